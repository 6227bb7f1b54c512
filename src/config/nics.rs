//! The site file's lists of network cards: which may carry the training's
//! traffic, and which may not.

use super::printable;
use crate::facts::PciAddress;

/// What names cards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicPattern {
    /// One function by its address.
    Address(PciAddress),
    /// RDMA devices or network devices by name, from the first character to the
    /// last; `*` stands for any characters, `?` for one, `[0-11]` for one of these
    /// numbers.
    Name(String),
}

/// The lists that hold for a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NicRules {
    /// Exactly these are used, where it is given.
    pub allow: Option<Vec<NicPattern>>,
    /// These are not used, whatever `allow` says.
    pub deny: Vec<NicPattern>,
}

/// The longest name of an RDMA device (IB_DEVICE_NAME_MAX of rdma/ib_verbs.h).
const LONGEST: usize = 64;

impl NicPattern {
    /// Reads one text of a list.
    ///
    /// # Errors
    /// What is wrong with it, in words that continue the text.
    pub fn parse(text: &str) -> Result<NicPattern, String> {
        if text.is_empty() {
            return Err("is empty".into());
        }
        if text.len() > LONGEST {
            return Err(format!("is longer than {LONGEST} characters"));
        }
        if let Some(address) = PciAddress::parse(text) {
            return Ok(NicPattern::Address(address));
        }
        if let Some(rest) = text.strip_prefix(['=', '^']) {
            let rest = printable(rest.trim_start_matches('='));
            return Err(format!(
                "begins with a sign of NCCL_IB_HCA: names are exact here, and cards to leave out stand in nic-deny; \
                 write \"{rest}\""
            ));
        }
        if let Some((name, rest)) = text.split_once(':') {
            return Err(about_colon(text, name, rest));
        }
        match tokens(text) {
            Err(why) => Err(why),
            Ok(_) => Ok(NicPattern::Name(text.into())),
        }
    }

    /// Whether it names a card, by its address or any of its names.
    pub fn names<'a>(&self, address: Option<PciAddress>, names: impl IntoIterator<Item = &'a str>) -> bool {
        match self {
            NicPattern::Address(own) => address == Some(*own),
            NicPattern::Name(own) => {
                let tokens = tokens(own);
                tokens.is_ok_and(|tokens| names.into_iter().any(|name| fits(&tokens, name.as_bytes())))
            }
        }
    }
}

/// As the site file has it.
impl std::fmt::Display for NicPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NicPattern::Address(address) => write!(f, "{address}"),
            NicPattern::Name(name) => f.write_str(&printable(name)),
        }
    }
}

/// What a text with a colon, which is no address, was to be.
fn about_colon(text: &str, name: &str, rest: &str) -> String {
    if PciAddress::parse(&format!("0000:{text}")).is_some() {
        return format!("is an address without its domain; write \"0000:{text}\", as sysfs names it");
    }
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hex(name) || name.contains(['*', '?']) && rest.contains(':') {
        return "is no PCI address; one is written whole, as 0000:18:00.0, without * and ?".into();
    }
    format!(
        "names a port, as NCCL_IB_HCA does: ports are not written here, a card is used with all its ports that are up; \
         write \"{}\"",
        printable(name)
    )
}

/// A piece of a name's pattern.
enum Token {
    Byte(u8),
    /// `?`
    One,
    /// `*`
    Any,
    /// `[0-3,7]`: lowest and highest number, and the digits the lowest is written with.
    Number(Vec<(u32, u32, usize)>),
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        rest = &rest[first.len_utf8()..];
        tokens.push(match first {
            '*' => Token::Any,
            '?' => Token::One,
            '[' => {
                let (inside, after) = rest.split_once(']').ok_or("has [ without ]")?;
                rest = after;
                Token::Number(inside.split(',').map(numbers).collect::<Result<_, String>>()?)
            }
            ']' => return Err("has ] without [".into()),
            ',' => return Err("holds several names; each is a text of its own: [\"mlx5_0\", \"mlx5_1\"]".into()),
            c if c.is_ascii_alphanumeric() || "._-@".contains(c) => Token::Byte(c as u8),
            c => return Err(format!("holds {c:?}, which stands in no card's name")),
        });
    }
    Ok(tokens)
}

fn numbers(part: &str) -> Result<(u32, u32, usize), String> {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.len() <= 6 && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u32>().ok()).flatten()
    };
    let (low, high) = part.split_once('-').unwrap_or((part, part));
    match (number(low), number(high)) {
        (Some(from), Some(to)) if from <= to => Ok((from, to, low.len())),
        (Some(from), Some(to)) => Err(format!("has numbers that end ({to}) before they begin ({from})")),
        _ => Err(format!("has '{}' in brackets, where numbers stand: [0-7]", printable(part))),
    }
}

/// Whether the tokens make the whole name. Keeps every place that can be reached,
/// so that no pattern costs more than the product of both lengths.
fn fits(tokens: &[Token], name: &[u8]) -> bool {
    let mut places = vec![false; name.len() + 1];
    places[0] = true;
    for token in tokens {
        let mut next = vec![false; name.len() + 1];
        for place in (0..=name.len()).filter(|place| places[*place]) {
            match token {
                Token::Byte(byte) if name.get(place) == Some(byte) => next[place + 1] = true,
                Token::One if place < name.len() => next[place + 1] = true,
                Token::Byte(_) | Token::One => {}
                Token::Any => next[place..].fill(true),
                Token::Number(ranges) => {
                    let digits = name[place..].iter().take(6).take_while(|byte| byte.is_ascii_digit()).count();
                    for length in 1..=digits {
                        next[place + length] |= is_one_of(ranges, &name[place..place + length]);
                    }
                }
            }
        }
        places = next;
    }
    places[name.len()]
}

/// Whether digits are a number of these, written as the range's lowest is.
fn is_one_of(ranges: &[(u32, u32, usize)], digits: &[u8]) -> bool {
    let number = digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    ranges
        .iter()
        .any(|(low, high, width)| (*low..=*high).contains(&number) && format!("{number:0width$}").len() == digits.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> NicPattern {
        NicPattern::parse(text).unwrap_or_else(|why| panic!("{text} {why}"))
    }

    /// NCCL_IB_HCA=mlx5_1 takes mlx5_10 too (NCCL, src/misc/utils.cc, matchIf); an
    /// admin's list here does not.
    #[test]
    fn names_are_exact_and_stars_say_where_they_are_not() {
        for (text, yes, no) in [
            ("mlx5_1", &["mlx5_1"][..], &["mlx5_10", "mlx5_", "amlx5_1", ""][..]),
            ("mlx5_1?", &["mlx5_10", "mlx5_19"], &["mlx5_1", "mlx5_100"]),
            ("mlx5_[0-7]", &["mlx5_0", "mlx5_7"], &["mlx5_8", "mlx5_17", "mlx5_07", "mlx5_0a"]),
            ("mlx5_[0,9-11]", &["mlx5_0", "mlx5_9", "mlx5_10", "mlx5_11"], &["mlx5_1", "mlx5_12", "mlx5_09"]),
            ("mlx5_[08-10]", &["mlx5_08", "mlx5_10"], &["mlx5_8", "mlx5_010"]),
            ("ib*", &["ib", "ib0", "ibp26s0"], &["aib0", "i"]),
            ("rdmap[0-999]s*", &["rdmap82s0"], &["rdmap82", "rdmaps0"]),
            ("enp[1-3][0-9]s0", &["enp12s0", "enp39s0"], &["enp1s0", "enp42s0"]),
            ("*", &["", "x"], &[]),
        ] {
            let pattern = pattern(text);
            yes.iter().for_each(|name| assert!(pattern.names(None, [*name]), "{text} {name}"));
            no.iter().for_each(|name| assert!(!pattern.names(None, [*name]), "{text} {name}"));
            assert_eq!(pattern.to_string(), text);
        }
        // Any of a card's names.
        assert!(pattern("ib0").names(None, ["mlx5_0", "ib0"]) && !pattern("ib0").names(None, []));
    }

    #[test]
    fn addresses_name_one_function() {
        let address = PciAddress::parse("0000:0c:00.1");
        assert!(pattern("0000:0C:00.1").names(address, []) && pattern("00000000:0c:00.1").names(address, []));
        assert!(!pattern("0000:0c:00.0").names(address, ["0000:0c:00.0"]));
        assert!(!pattern("0000:0c:00.1").names(None, ["0000:0c:00.1"]));
    }

    #[test]
    fn what_is_no_pattern_says_what_to_write() {
        for (text, part) in [
            ("", "is empty"),
            ("mlx5_0:1", "ports are not written here"),
            ("mlx5_0:1", "write \"mlx5_0\""),
            ("mlx5_*:1", "ports are not written here"),
            ("=mlx5_0", "names are exact here"),
            ("^mlx5_7", "nic-deny; write \"mlx5_7\""),
            ("^=mlx5_7", "write \"mlx5_7\""),
            ("mlx5_0,mlx5_1", "each is a text of its own"),
            ("18:00.0", "write \"0000:18:00.0\""),
            ("0000:18:00.*", "written whole"),
            ("0000:*", "no PCI address"),
            ("*:18:00.0", "no PCI address"),
            ("mlx5_[a-f]", "where numbers stand"),
            ("mlx5_[]", "where numbers stand"),
            ("mlx5_[7-0]", "end (0) before they begin (7)"),
            ("mlx5_[0-", "[ without ]"),
            ("mlx5_0]", "] without ["),
            ("mlx5 0", "' '"),
            ("mlx\u{1b}", "stands in no card's name"),
            (&"x".repeat(65), "longer than 64"),
        ] {
            let why = NicPattern::parse(text).expect_err(text);
            assert!(why.contains(part) && !why.contains(char::is_control), "{text}: {why}");
        }
    }

    #[test]
    fn a_pattern_made_to_cost_time_costs_none() {
        let pattern = pattern(&"*[0-9]".repeat(10));
        assert!(pattern.names(None, ["9".repeat(4000).as_str()]));
        assert!(!pattern.names(None, [format!("{}x", "9".repeat(4000)).as_str()]));
    }
}
