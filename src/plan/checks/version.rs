//! Versions of NCCL and PyTorch, as images tell them in their environment.

use std::fmt;

use super::Subject;

/// Where images of CUDA and NGC write NCCL's version ("2.21.5-1+cuda12.4").
pub(in crate::plan) const NCCL: &str = "NCCL_VERSION";
/// Where NGC's images write PyTorch's ("2.3.0a0+ebedce2").
pub(super) const PYTORCH: &str = "PYTORCH_VERSION";

/// A version's numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::plan) struct Version(Vec<u32>);

impl Version {
    /// What an image's variable says; `None` where there is none.
    pub fn of(subject: &Subject, name: &str) -> Option<Version> {
        Version::parse(subject.value(name)?)
    }

    /// Numbers and dots up to the first other character.
    pub fn parse(text: &str) -> Option<Version> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let numbers: Option<Vec<u32>> =
            text[..end].trim_end_matches('.').split('.').map(|number| number.parse().ok()).collect();
        numbers.filter(|numbers| numbers.len() > 1).map(Version)
    }

    /// Whether it is older than a version; nothing is older than "".
    pub fn before(&self, other: &str) -> bool {
        Version::parse(other).is_some_and(|other| self.0 < other.0)
    }

    /// Whether it is newer than all releases that begin like this version.
    pub fn after(&self, other: &str) -> bool {
        Version::parse(other).is_some_and(|other| {
            let same = self.0.len().min(other.0.len());
            self.0[..same] > other.0[..]
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&numbers.join("."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_images_write_them() {
        for (text, shown) in [
            ("2.21.5", Some("2.21.5")),
            ("2.21.5-1+cuda12.4", Some("2.21.5")),
            ("2.3.0a0+ebedce2", Some("2.3.0")),
            ("2.30.7", Some("2.30.7")),
            ("v2", None),
            ("", None),
            ("2", None),
            ("99999999999.1", None),
        ] {
            assert_eq!(Version::parse(text).map(|version| version.to_string()).as_deref(), shown, "{text:?}");
        }
        let version = |text| Version::parse(text).unwrap();
        assert!(version("2.9.1").before("2.21") && !version("2.21.0").before("2.21"));
        assert!(!version("2.21.5").before(""));
        assert!(version("2.5.0").after("2.4") && !version("2.4.8").after("2.4"));
        assert!(!version("2.4.8").after(""));
    }
}
