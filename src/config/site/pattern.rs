//! Names of partitions or nodes: a host list as Slurm writes it, in which `*`
//! and `?` may stand.

use crate::facts::hostlist;

/// Some names.
#[derive(Debug, Clone)]
pub struct Pattern {
    text: String,
    /// Names without brackets.
    globs: Vec<String>,
}

impl Pattern {
    /// Reads `gpu[01-16],dgx*`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Pattern, String> {
        let globs = hostlist::expand(text).map_err(|error| error.to_string())?;
        Ok(Pattern { text: text.into(), globs })
    }

    /// Whether `name` is one of these.
    pub fn fits(&self, name: &str) -> bool {
        self.globs.iter().any(|glob| matches(glob.as_bytes(), name.as_bytes()))
    }

    /// How many names it is kept as.
    pub fn len(&self) -> usize {
        self.globs.len()
    }

    /// As written.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// `*`: any characters, `?`: one. Each `*` is tried once more with every further
/// character, so the work is at most the product of both lengths.
fn matches(glob: &[u8], name: &[u8]) -> bool {
    let (mut at, mut place) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while place < name.len() {
        match glob.get(at) {
            Some(b'*') => {
                star = Some((at, place));
                at += 1;
            }
            Some(c) if *c == b'?' || *c == name[place] => {
                at += 1;
                place += 1;
            }
            _ => match star {
                Some((star_at, start)) => {
                    star = Some((star_at, start + 1));
                    at = star_at + 1;
                    place = start + 1;
                }
                None => return false,
            },
        }
    }
    glob[at..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_lists_with_stars() {
        for (pattern, yes, no) in [
            ("gpu", &["gpu"][..], &["gpu1", "cpu", ""][..]),
            ("gpu[01-16]", &["gpu01", "gpu16"], &["gpu1", "gpu17", "gpu01a"]),
            ("gpu*", &["gpu", "gpu01", "gpu-a"], &["agpu", "gp"]),
            ("*", &["anything", ""], &[]),
            ("dgx[1-2]-*,login?", &["dgx1-a", "dgx2-", "login1"], &["dgx3-a", "login", "login12"]),
            ("a*b*c", &["abc", "aXbYbc", "abbc"], &["ab", "abcd"]),
        ] {
            let parsed = Pattern::parse(pattern).unwrap_or_else(|why| panic!("{pattern}: {why}"));
            yes.iter().for_each(|name| assert!(parsed.fits(name), "{pattern} {name}"));
            no.iter().for_each(|name| assert!(!parsed.fits(name), "{pattern} {name}"));
        }
        for pattern in ["", "gpu[1-", "gpu[9-1]", "[1-999999999]"] {
            assert!(Pattern::parse(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn many_stars_cost_no_time() {
        let glob = "*a".repeat(500);
        assert!(!matches(glob.as_bytes(), "a".repeat(250).as_bytes()));
    }
}
