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
    /// The same for NCCL_P2P_DISABLE, where only 1 counts (src/graph/paths.cc).
    One,
    /// The same, one of these numbers.
    OneOf(&'static [i64]),
    /// NCCL_IB_TIMEOUT: the same, an exponent; see `ib_timeout_seconds`.
    AckTimeout,
    /// NCCL's flags: these words joined by `|`, or the number they stand for,
    /// which is their position.
    Flags(&'static [&'static str]),
    /// `strtoull` with base 0; NCCL ignores anything else (NCCL_SOCKET_MAGIC).
    Unsigned,
    /// Decimal digits as C's `atoi` or Python's `int` take them, between two bounds.
    Number(i64, i64),
    /// Such numbers, separated by commas.
    Numbers(i64, i64),
    /// A number from 0 to 1.
    Fraction,
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
            Grammar::One => "1; anything else, 0, 2 and true among them, changes nothing".into(),
            Grammar::OneOf(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(i64::to_string).collect();
                format!("integer, one of {}; read with base 0, a word counts as 0", numbers.join(", "))
            }
            Grammar::AckTimeout => {
                format!("integer, {}; read with base 0, a word counts as 0", range(TIMEOUTS.0, TIMEOUTS.1))
            }
            Grammar::Flags(words) => format!("{} joined by |, or 0 to {}", words.join(", "), words.len() - 1),
            Grammar::Unsigned => "integer from 0 to 2^64-1; read with base 0, anything else is ignored".into(),
            Grammar::TorchInteger(low, high) if *high == i64::from(i32::MAX) => {
                format!("number, {low} or more; a word throws")
            }
            Grammar::TorchInteger(low, high) => format!("number, {}; a word throws", range(*low, *high)),
            Grammar::Number(low, high) => format!("number, {}", range(*low, *high)),
            Grammar::Numbers(low, high) => format!("number[,number…], each {}", range(*low, *high)),
            Grammar::Fraction => "number from 0 to 1".into(),
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
            Grammar::One => integer_fault(value, 0, 1),
            Grammar::AckTimeout => integer_fault(value, TIMEOUTS.0, TIMEOUTS.1),
            Grammar::OneOf(numbers) => integer_fault(value, i64::MIN, i64::MAX).or_else(|| {
                let (number, _) = nccl_integer(value)?;
                (!numbers.contains(&number)).then_some(Fault::OutOfRange(number))
            }),
            Grammar::Flags(words) => match nccl_integer(value) {
                Some((_, rest)) if rest != value => {
                    let highest = i64::try_from(words.len()).unwrap_or(i64::MAX) - 1;
                    integer_fault(value, 0, highest)
                }
                _ => value.split('|').find(|word| !words.contains(word)).map(|word| no_such(word, words)),
            },
            Grammar::Unsigned => {
                let text = value.trim_start();
                let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
                let number = match hexadecimal {
                    Some(digits) => u64::from_str_radix(digits, 16),
                    None if text.len() > 1 && text.starts_with('0') => u64::from_str_radix(text, 8),
                    None => text.parse(),
                };
                number.is_err().then_some(Fault::NoSuchWord(None))
            }
            Grammar::Number(low, high) => number_fault(value, *low, *high),
            Grammar::Numbers(low, high) => value.split(',').find_map(|number| number_fault(number, *low, *high)),
            Grammar::Fraction => match value.trim().parse::<f64>() {
                Ok(number) if (0.0..=1.0).contains(&number) => None,
                Ok(number) if number.is_finite() => Some(Fault::OutOfRange(number as i64)),
                _ => Some(Fault::NoSuchWord(None)),
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

/// The exponents of NCCL_IB_TIMEOUT; 0, and from 32 on, mean without end.
const TIMEOUTS: (i64, i64) = (1, 31);

/// NCCL_IB_TIMEOUT in seconds: how long a NIC waits for one answer, and until it
/// gives up after the seven tries of NCCL_IB_RETRY_CNT's default. The InfiniBand
/// specification has 4.096 us * 2^exponent and lets a NIC take up to four times
/// as long. `None` where it waits for ever.
pub fn ib_timeout_seconds(exponent: i64) -> Option<(f64, f64)> {
    let exponent = i32::try_from(exponent).ok().filter(|_| (TIMEOUTS.0..=TIMEOUTS.1).contains(&exponent))?;
    let one = 4.096e-6 * 2f64.powi(exponent);
    Some((one, 7.0 * one))
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

fn number_fault(value: &str, low: i64, high: i64) -> Option<Fault> {
    match value.trim().parse::<i64>() {
        Ok(number) if number < low || number > high => Some(Fault::OutOfRange(number)),
        Ok(_) => None,
        Err(_) => Some(Fault::NoSuchWord(None)),
    }
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
        let timeout = Grammar::AckTimeout;
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
        // NCCL, src/graph/paths.cc, ncclGetLevel: strtol(text) == 1.
        assert_eq!(Grammar::One.fault("1"), None);
        assert_eq!(Grammar::One.fault("0"), None);
        assert_eq!(Grammar::One.fault("2"), Some(Fault::OutOfRange(2)));
        assert_eq!(Grammar::One.fault("true"), Some(Fault::WordForInteger));
        let threads = Grammar::OneOf(&[64, 128, 256, 512]);
        assert_eq!(threads.fault("256"), None);
        assert_eq!(threads.fault("0x100"), None);
        assert_eq!(threads.fault("300"), Some(Fault::OutOfRange(300)));
        assert_eq!(threads.fault("all"), Some(Fault::WordForInteger));
        let policy = Grammar::Flags(&["DEFAULT", "EFFICIENCY", "ZERO"]);
        for value in ["DEFAULT", "EFFICIENCY|ZERO", "0", "2"] {
            assert_eq!(policy.fault(value), None, "{value:?}");
        }
        assert_eq!(policy.fault("ZERO|EFICIENCY"), Some(Fault::NoSuchWord(Some("EFFICIENCY"))));
        assert_eq!(policy.fault("3"), Some(Fault::OutOfRange(3)));
        for value in ["0", "4711", "0x1267", "0xffffffffffffffff", "18446744073709551615"] {
            assert_eq!(Grammar::Unsigned.fault(value), None, "{value:?}");
        }
        for value in ["123.0", "job", "0x", "089", "18446744073709551616"] {
            assert_eq!(Grammar::Unsigned.fault(value), Some(Fault::NoSuchWord(None)), "{value:?}");
        }
        let threads = Grammar::Numbers(1, i64::MAX);
        assert_eq!(threads.fault("4"), None);
        assert_eq!(threads.fault("8,2"), None);
        assert_eq!(threads.fault("8,0"), Some(Fault::OutOfRange(0)));
        assert_eq!(threads.fault("8;2"), Some(Fault::NoSuchWord(None)));
        assert_eq!(Grammar::Fraction.fault(".75"), None);
        assert_eq!(Grammar::Fraction.fault("75"), Some(Fault::OutOfRange(75)));
        assert_eq!(Grammar::Fraction.fault("75%"), Some(Fault::NoSuchWord(None)));
        let debug = Grammar::AnyCase(&["VERSION", "WARN", "INFO", "ABORT", "TRACE"]);
        assert_eq!(debug.fault("warn"), None);
        assert_eq!(debug.fault("WARM"), Some(Fault::NoSuchWord(Some("WARN"))));
    }

    /// NCCL's guide: 4.096 us * 2^value, 1 to 31; the sums are worked out by
    /// hand: 2^22 = 4194304.
    #[test]
    fn the_exponents_of_the_ib_timeout_in_seconds() {
        for (exponent, one, all) in
            [(1, 0.000_008_192, 0.000_057_344), (14, 0.067_108_864, 0.469_762), (20, 4.294_967, 30.064_77)]
                .into_iter()
                .chain([(22, 17.179_869, 120.259_08), (23, 34.359_738, 240.518_17), (31, 8_796.093, 61_572.65)])
        {
            let (is_one, is_all) = ib_timeout_seconds(exponent).expect("a time");
            assert!((is_one - one).abs() < 1e-6 * one, "{exponent}: {is_one}");
            assert!((is_all - all).abs() < 1e-6 * all, "{exponent}: {is_all}");
        }
        for exponent in [-1, 0, 32, 60, 120, i64::MAX, i64::MIN] {
            assert_eq!(ib_timeout_seconds(exponent), None, "{exponent}");
        }
    }

    #[test]
    fn each_grammar_says_what_it_takes() {
        for (grammar, expected) in [
            (Grammar::Integer(0, 7), "0 to 7"),
            (Grammar::AckTimeout, "1 to 31"),
            (Grammar::OneOf(&[64, 128]), "64, 128"),
            (Grammar::Flags(&["DEFAULT", "EFFICIENCY", "ZERO"]), "joined by |, or 0 to 2"),
            (Grammar::Number(1, i64::MAX), "1 or more"),
            (Grammar::Number(i64::MIN, 3), "3 or less"),
            (Grammar::TorchInteger(0, 3), "0 to 3; a word throws"),
            (Grammar::TorchInteger(1, 2_147_483_647), "1 or more; a word throws"),
            (Grammar::One, "2 and true among them"),
            (Grammar::Word(&["OFF", "INFO"]), "OFF, INFO (exactly so)"),
        ] {
            let described = grammar.describe();
            assert!(described.contains(expected), "{grammar:?}: {described}");
        }
    }
}
