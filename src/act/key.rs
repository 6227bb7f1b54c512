//! The launch's secret: made in srun, handed to the tasks in Slurm's own launch
//! request, and sent by none of our own protocols. Who can answer a challenge with it belongs to this launch. HMAC-SHA256
//! (RFC 2104, FIPS 180-4).

use std::fmt;
use std::io;

use hmac_sha256::HMAC;

use crate::system::random;

/// Bytes of a key and of a tag.
pub const LENGTH: usize = 32;

/// A secret key.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; LENGTH]);

/// A message's authentication code.
pub type Tag = [u8; LENGTH];

impl Key {
    /// A new one.
    ///
    /// # Errors
    /// When the kernel gives no random numbers.
    pub fn new() -> io::Result<Key> {
        random::bytes().map(Key)
    }

    /// Reads 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Key> {
        let digits = text.as_bytes();
        if digits.len() != 2 * LENGTH || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut key = [0; LENGTH];
        for (byte, pair) in key.iter_mut().zip(digits.chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Key(key))
    }

    /// As [`Key::from_hex`] reads it.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Another key for one purpose: knowing it tells nothing of this one.
    pub fn derive(&self, purpose: &str) -> Key {
        self.derive_from(&[purpose.as_bytes()])
    }

    /// The same for a purpose that has several parts.
    pub fn derive_from(&self, purpose: &[&[u8]]) -> Key {
        Key(self.tag(purpose))
    }

    /// The code of these parts. Each counts with its length, so that no two lists of
    /// parts are the same message.
    pub fn tag(&self, parts: &[&[u8]]) -> Tag {
        self.mac(parts).finalize()
    }

    /// Whether `tag` is the code of these parts, in a time that tells nothing.
    pub fn verify(&self, parts: &[&[u8]], tag: &Tag) -> bool {
        self.mac(parts).finalize_verify(tag)
    }

    fn mac(&self, parts: &[&[u8]]) -> HMAC {
        let mut mac = HMAC::new(self.0);
        for part in parts {
            mac.update((part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        mac
    }
}

/// Not the secret.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Which end of a connection a tag is of: no tag of one direction fits the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Where rank 0 is.
    Server,
    /// Any other.
    Client,
}

impl Side {
    /// A part of what is tagged.
    #[must_use]
    pub fn label(self) -> &'static [u8] {
        match self {
            Side::Server => b"from server",
            Side::Client => b"from client",
        }
    }

    /// The other end.
    #[must_use]
    pub fn other(self) -> Side {
        match self {
            Side::Server => Side::Client,
            Side::Client => Side::Server,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 1: the crate is what it says it is.
    #[test]
    fn the_published_vector() {
        let tag = HMAC::mac(b"Hi There", [0x0b; 20]);
        let hex: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    }

    #[test]
    fn a_key_comes_back_from_its_digits_and_nothing_else_does() {
        let key = Key::new().unwrap();
        assert_eq!(Key::from_hex(&key.to_hex()), Some(key.clone()));
        let digits = key.to_hex();
        for text in ["", "0", &digits[1..], &format!("{digits}0"), &digits.replace(&digits[..1], "g"), &"+1".repeat(32)]
        {
            assert_eq!(Key::from_hex(text), None, "{text:?}");
        }
        assert_ne!(Key::new().unwrap(), key);
    }

    #[test]
    fn a_tag_fits_its_parts_and_its_key_only() {
        let key = Key::from_hex(&"07".repeat(32)).unwrap();
        let tag = key.tag(&[b"ab", b"c"]);
        assert!(key.verify(&[b"ab", b"c"], &tag));
        assert!(!key.verify(&[b"a", b"bc"], &tag));
        assert!(!key.verify(&[b"abc"], &tag));
        assert!(!key.derive("store").verify(&[b"ab", b"c"], &tag));
        assert_ne!(key.derive("store"), key.derive("exits"));
    }

    #[test]
    fn a_debug_text_holds_no_digit_of_it() {
        assert_eq!(format!("{:?}", Key::new().unwrap()), "Key(…)");
    }
}
