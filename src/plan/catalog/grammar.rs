//! How the readers parse their variables, as far as a value can be judged
//! without them.

/// What a variable's value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grammar {
    /// Anything.
    Text,
    /// NCCL's integers: `strtoll` with base 0, so that 0x10 is 16, 010 is 8 and
    /// `true` is 0; an empty value counts as unset (NCCL, src/misc/param.cc).
    /// Lowest and highest value that make sense.
    Integer(i64, i64),
    /// The same, where 0 is off and anything else on.
    Switch,
    /// Decimal digits as C's `atoi` or Python's `int` take them, between two bounds.
    Number(i64, i64),
    /// c10d's booleans: y, yes, 1, t, true, n, no, 0, f, false in any case;
    /// anything else throws (c10d/Utils.hpp, getCvarBool).
    TorchBool,
    /// c10d's integers: `std::stoi`, which throws on text (c10d/Utils.hpp).
    TorchInteger(i64, i64),
    /// One of these words, exactly.
    Word(&'static [&'static str]),
    /// One of these words in any case.
    AnyCase(&'static [&'static str]),
    /// A distance in NCCL's topology (src/graph/paths.cc).
    Level,
    /// NCCL's list of network interfaces: `[^][=]prefix,…` (src/misc/socket.cc).
    Interfaces,
    /// NCCL's list of RDMA devices: `[^][=]device[:port],…`.
    RdmaDevices,
    /// NCCL_ALGO: `list;function:list`.
    Algorithms,
    /// NCCL_PROTO: the same with protocols.
    Protocols,
    /// NCCL_DEBUG_SUBSYS: comma list of subsystems, `^` for all but these.
    Subsystems,
    /// Exact names of network interfaces, comma separated; no prefixes.
    ExactInterfaces,
    /// A file or directory.
    Path,
    /// `key:value,…` of PyTorch's allocator.
    AllocatorKeys,
    /// `HOST:PORT`.
    Endpoint,
    /// `key=value,…`.
    Pairs,
    /// CUDA's list of devices: indices, UUIDs, MIG names.
    Devices,
    /// A number with a unit, as UCX takes it: 8k, 1.0s.
    WithUnit,
}

/// What is wrong with a value, by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A word where NCCL reads an integer: it takes 0.
    WordForInteger,
    /// A leading zero makes NCCL read an octal number; its value.
    Octal(i64),
    /// Text behind the number, which NCCL ignores; the number.
    Trailing(i64),
    /// Outside the range that makes sense; the number.
    OutOfRange(i64),
    /// NCCL takes its default: beyond 64 bits.
    Overflow,
    /// None of the words; the nearest, if one is near.
    NoSuchWord(Option<&'static str>),
    /// The reader throws.
    Throws,
}

/// NCCL's distances, nearest first (src/graph/paths.cc).
pub struct Level;

impl Level {
    /// In NCCL's order.
    pub const NAMES: [&'static str; 10] = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"];
    /// What the integers 0 to 4 of old NCCL mean; beyond it SYS.
    pub const LEGACY: [&'static str; 5] = ["LOC", "PIX", "PXB", "PHB", "SYS"];
}

/// What NCCL's `strtoll(text, &end, 0)` makes of a value, and what is left
/// behind the number. `None` on overflow, where NCCL takes its default.
pub fn nccl_integer(text: &str) -> Option<(i64, &str)> {
    let rest = text.trim_start_matches([' ', '\t', '\n', '\u{b}', '\u{c}', '\r']);
    let (negative, rest) = match rest.as_bytes().first() {
        Some(b'-') => (true, &rest[1..]),
        Some(b'+') => (false, &rest[1..]),
        _ => (false, rest),
    };
    let hexadecimal =
        rest.len() > 2 && (rest.starts_with("0x") || rest.starts_with("0X")) && rest.as_bytes()[2].is_ascii_hexdigit();
    let (radix, digits) = if hexadecimal {
        (16, &rest[2..])
    } else if rest.starts_with('0') {
        (8, rest)
    } else {
        (10, rest)
    };
    let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    if end == 0 {
        // No number at all: strtoll gives 0 and leaves everything.
        return Some((0, text));
    }
    let magnitude = i128::from_str_radix(&digits[..end], radix).ok()?;
    let value = i64::try_from(if negative { -magnitude } else { magnitude }).ok()?;
    Some((value, &digits[end..]))
}

impl Grammar {
    /// For people: what the value may be.
    pub fn describe(&self) -> String {
        match self {
            Grammar::Text => "text".into(),
            Grammar::Integer(low, high) => format!("integer, {}; read with base 0, a word counts as 0", range(*low, *high)),
            Grammar::Switch => "0 or 1; read as an integer with base 0, so that a word such as true counts as 0".into(),
            Grammar::Number(low, high) | Grammar::TorchInteger(low, high) => format!("number, {}", range(*low, *high)),
            Grammar::TorchBool => "1, y, yes, t, true, 0, n, no, f, false in any case; anything else throws".into(),
            Grammar::Word(words) => format!("{} (exactly so)", words.join(", ")),
            Grammar::AnyCase(words) => words.join(", "),
            Grammar::Level => format!("{}; upper case", Level::NAMES.join(", ")),
            Grammar::Interfaces => "[^][=]name,…: prefixes of interface names; ^ excludes, = is exact, once in front for the whole list".into(),
            Grammar::RdmaDevices => "[^][=]device[:port],…: prefixes of RDMA device names; ^ excludes, = is exact, once in front for the whole list".into(),
            Grammar::Algorithms => "list;function:list of Ring, Tree, CollnetChain, CollnetDirect, NVLS, NVLSTree, PAT; ^ in front excludes".into(),
            Grammar::Protocols => "list;function:list of LL, LL128, Simple; ^ in front excludes".into(),
            Grammar::Subsystems => format!("comma list of {}; ^ in front: all but these", SUBSYSTEMS.join(", ")),
            Grammar::ExactInterfaces => "name,…: whole names of interfaces, neither prefixes nor ^ nor =".into(),
            Grammar::Path => "path".into(),
            Grammar::AllocatorKeys => "key:value,…".into(),
            Grammar::Endpoint => "host:port".into(),
            Grammar::Pairs => "key=value,…".into(),
            Grammar::Devices => "indices, GPU-UUIDs or MIG names, comma separated; the first invalid one ends the list".into(),
            Grammar::WithUnit => "number with a unit (8k, 1.0s), or auto".into(),
        }
    }

    /// What is wrong with `value` by this grammar alone. Grammars of lists are
    /// judged by `plan/checks`, which knows more.
    pub fn fault(&self, value: &str) -> Option<Fault> {
        if value.is_empty() {
            return None;
        }
        match self {
            Grammar::Integer(low, high) => integer_fault(value, *low, *high),
            Grammar::Switch => integer_fault(value, i64::MIN, i64::MAX),
            Grammar::Number(low, high) => match value.trim().parse::<i64>() {
                Ok(number) if number < *low || number > *high => Some(Fault::OutOfRange(number)),
                Ok(_) => None,
                Err(_) => Some(Fault::NoSuchWord(None)),
            },
            Grammar::TorchBool => {
                let words = ["y", "yes", "1", "t", "true", "n", "no", "0", "f", "false"];
                let lower = value.to_ascii_lowercase();
                (!words.contains(&lower.as_str())).then_some(Fault::Throws)
            }
            Grammar::TorchInteger(low, high) => match nccl_decimal(value) {
                Some(number) if number < *low || number > *high => Some(Fault::OutOfRange(number)),
                Some(_) => None,
                None => Some(Fault::Throws),
            },
            Grammar::Word(words) => (!words.contains(&value)).then(|| no_such(value, words)),
            Grammar::AnyCase(words) => {
                (!words.iter().any(|word| word.eq_ignore_ascii_case(value))).then(|| no_such(value, words))
            }
            _ => None,
        }
    }
}

/// The subsystems of NCCL_DEBUG_SUBSYS (src/debug.cc).
pub const SUBSYSTEMS: [&str; 19] = [
    "INIT",
    "COLL",
    "P2P",
    "SHM",
    "NET",
    "GRAPH",
    "TUNING",
    "ENV",
    "ALLOC",
    "ALLOC_HOST",
    "CALL",
    "PROXY",
    "NVLS",
    "BOOTSTRAP",
    "REG",
    "PROFILE",
    "RAS",
    "DESTROY",
    "ALL",
];

fn no_such(value: &str, words: &'static [&'static str]) -> Fault {
    let lower: Vec<String> = words.iter().map(|word| word.to_ascii_lowercase()).collect();
    let near = crate::config::nearest(value, lower.iter().map(String::as_str));
    let near = near.and_then(|near| lower.iter().position(|word| word == near)).map(|at| words[at]);
    Fault::NoSuchWord(near)
}

fn integer_fault(value: &str, low: i64, high: i64) -> Option<Fault> {
    let Some((number, rest)) = nccl_integer(value) else {
        return Some(Fault::Overflow);
    };
    if rest == value {
        return Some(Fault::WordForInteger);
    }
    if !rest.is_empty() {
        return Some(Fault::Trailing(number));
    }
    let digits = value.trim_start().trim_start_matches(['-', '+']);
    if digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Fault::Octal(number));
    }
    (number < low || number > high).then_some(Fault::OutOfRange(number))
}

/// `std::stoi` and `atoi`: leading blanks, a sign, digits; text behind is ignored.
fn nccl_decimal(value: &str) -> Option<i64> {
    let text = value.trim_start();
    let sign = usize::from(text.starts_with(['-', '+']));
    let end = text[sign..].find(|c: char| !c.is_ascii_digit()).map_or(text.len(), |end| end + sign);
    text[..end].parse::<i32>().ok().map(i64::from)
}

fn range(low: i64, high: i64) -> String {
    match (low, high) {
        (i64::MIN, i64::MAX) => "any".into(),
        (low, i64::MAX) => format!("{low} or more"),
        (i64::MIN, high) => format!("{high} or less"),
        (low, high) => format!("{low} to {high}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_as_strtoll_with_base_0_reads_them() {
        // strtol(3).
        for (text, expected) in [
            ("22", Some((22, ""))),
            ("0x10", Some((16, ""))),
            ("010", Some((8, ""))),
            ("09", Some((0, "9"))),
            ("0x", Some((0, "x"))),
            ("-2", Some((-2, ""))),
            (" 7", Some((7, ""))),
            ("20 ", Some((20, " "))),
            ("4M", Some((4, "M"))),
            ("true", Some((0, "true"))),
            ("", Some((0, ""))),
            ("-", Some((0, "-"))),
            ("9223372036854775807", Some((i64::MAX, ""))),
            ("9223372036854775808", None),
            ("99999999999999999999999999999999999999999999", None),
        ] {
            assert_eq!(nccl_integer(text), expected, "{text:?}");
        }
    }

    #[test]
    fn faults_by_grammar() {
        let timeout = Grammar::Integer(1, 31);
        for (value, expected) in [
            ("22", None),
            ("", None),
            ("0x16", None),
            ("120", Some(Fault::OutOfRange(120))),
            ("abc", Some(Fault::WordForInteger)),
            ("20 ", Some(Fault::Trailing(20))),
            ("022", Some(Fault::Octal(18))),
        ] {
            assert_eq!(timeout.fault(value), expected, "{value:?}");
        }
        assert_eq!(Grammar::Switch.fault("true"), Some(Fault::WordForInteger));
        assert_eq!(Grammar::Switch.fault("0"), None);
        for (value, expected) in
            [("1", None), ("Yes", None), ("TRUE", None), ("on", Some(Fault::Throws)), ("2", Some(Fault::Throws))]
        {
            assert_eq!(Grammar::TorchBool.fault(value), expected, "{value:?}");
        }
        let debug = Grammar::AnyCase(&["VERSION", "WARN", "INFO", "ABORT", "TRACE"]);
        assert_eq!(debug.fault("warn"), None);
        assert_eq!(debug.fault("WARM"), Some(Fault::NoSuchWord(Some("WARN"))));
    }
}
