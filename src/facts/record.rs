//! A record of this machine: the few files that `NodeFacts` are read from, for a
//! bug report. What identifies a device or an address is replaced, so that the
//! report can be public.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::trace::{Look, Seen, traced};

/// What stands at a path of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// A directory; those above files and links are not listed.
    Directory,
    /// A file and its text.
    File(String),
    /// A symbolic link and where it leads, relative to its own directory.
    Link(String),
}

/// The files of a machine that its reader looks at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// By path below the root, without a leading slash.
    pub entries: BTreeMap<String, Entry>,
    /// What is there and could not be read, with the reason.
    pub refused: Vec<String>,
}

/// As the kernel follows them (MAXSYMLINKS of linux/namei.h).
const MOST_LINKS: usize = 40;

/// Bytes of names and texts, well below what a child may answer.
const LARGEST: usize = 400 * 1024;

impl Record {
    /// What `read` looks at below `root`.
    pub fn of(root: &Path, read: impl FnOnce()) -> Record {
        let ((), looks) = traced(read);
        let mut record = Record::default();
        for look in looks {
            record.add(root, look);
        }
        record.drop_parents();
        record.refused.sort();
        record.refused.dedup();
        Record { entries: Identities::default().replace(record.entries), ..record }
    }

    /// Itself, where it is no larger than what a child may answer.
    pub(super) fn bounded(self) -> Result<Record, String> {
        let length = |(name, entry): (&String, &Entry)| match entry {
            Entry::Directory => name.len() + 20,
            Entry::File(text) | Entry::Link(text) => name.len() + text.len() + 20,
        };
        let bytes: usize = self.entries.iter().map(length).sum();
        if bytes <= LARGEST {
            return Ok(self);
        }
        let many = self.entries.keys().filter(|name| name.starts_with("sys/class/net/")).count();
        Err(format!(
            "{} files of {bytes} bytes are more than a record holds ({many} network devices)",
            self.entries.len()
        ))
    }

    fn add(&mut self, root: &Path, look: Look) {
        match look.seen {
            Seen::Text(bytes) => self.walk(root, &look.path, true, Some(String::from_utf8_lossy(&bytes).into_owned())),
            Seen::End => self.walk(root, &look.path, true, None),
            Seen::Link => self.walk(root, &look.path, false, None),
            Seen::Names(names) => {
                self.walk(root, &look.path, true, None);
                names.iter().for_each(|name| self.walk(root, &look.path.join(name), false, None));
            }
            Seen::Refused(why) => self.refused.push(format!("{}: {why}", look.path.display())),
        }
    }

    /// Notes each link on the way to `path`, and what is at its end: `text`, where
    /// the reader has it.
    fn walk(&mut self, root: &Path, path: &Path, follow: bool, text: Option<String>) {
        let Ok(below) = path.strip_prefix(root) else {
            return;
        };
        let mut ahead: VecDeque<OsString> = parts(below);
        let mut here = PathBuf::new();
        let mut links = 0;
        while let Some(part) = ahead.pop_front() {
            if part == ".." {
                here.pop();
            } else {
                here.push(part);
            }
            let Ok(found) = fs::symlink_metadata(root.join(&here)) else {
                return;
            };
            let Some(name) = here.to_str().filter(|name| !name.contains(char::is_control)).map(String::from) else {
                return;
            };
            let is_last = ahead.is_empty();
            // It leads to the number of the process that asks.
            if name == "proc/self" {
                continue;
            }
            if found.is_symlink() {
                let Some(target) = fs::read_link(root.join(&here)).ok().filter(|_| links < MOST_LINKS) else {
                    return;
                };
                links += 1;
                here.pop();
                let mut relative = target.clone();
                if target.is_absolute() {
                    // Below another root the kernel leaves the tree here.
                    let Some(below) = target.strip_prefix("/").ok().filter(|_| root == Path::new("/")) else {
                        return;
                    };
                    relative = here.components().map(|_| "..").collect::<PathBuf>().join(below);
                }
                let Some(relative) = relative.to_str().filter(|target| !target.contains(char::is_control)) else {
                    return;
                };
                self.entries.insert(name, Entry::Link(relative.into()));
                if is_last && !follow {
                    return;
                }
                for part in parts(Path::new(relative)).into_iter().rev() {
                    ahead.push_front(part);
                }
            } else if is_last && !name.is_empty() {
                let entry = if found.is_dir() { Entry::Directory } else { Entry::File(String::new()) };
                let known = self.entries.entry(name).or_insert(entry);
                if let (Entry::File(known), Some(text)) = (known, &text) {
                    known.clone_from(text);
                }
            }
        }
    }

    /// A directory that something lies in follows from that.
    fn drop_parents(&mut self) {
        let has_children = |name: &str| {
            let below = format!("{name}/");
            let next = self.entries.range(below.clone()..).next();
            next.is_some_and(|(next, _)| next.starts_with(&below))
        };
        let is_parent = |(name, entry): &(&String, &Entry)| **entry == Entry::Directory && has_children(name);
        let parents: Vec<String> = self.entries.iter().filter(is_parent).map(|(name, _)| name.clone()).collect();
        for name in parents {
            self.entries.remove(&name);
        }
    }
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let part = |part: Component| match part {
        Component::Normal(name) => Some(name.to_os_string()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().filter_map(part).collect()
}

/// Identities of devices, each with its number: the same one is replaced by the
/// same wherever it stands, since that is how functions of one card are known.
#[derive(Debug, Default)]
struct Identities {
    seen: BTreeMap<String, u64>,
}

impl Identities {
    /// In names, texts and links alike: a virtual machine's devices have UUIDs in
    /// their paths.
    fn replace(&mut self, entries: BTreeMap<String, Entry>) -> BTreeMap<String, Entry> {
        let replaced = entries.into_iter().map(|(path, entry)| {
            let entry = match entry {
                Entry::Directory => Entry::Directory,
                Entry::Link(target) => Entry::Link(self.without(&target)),
                Entry::File(text) => Entry::File(match path.rsplit_once('/').unwrap_or(("", &path)) {
                    (_, "nccl.conf") => settings_without_secrets(&text),
                    ("proc/net" | "proc/self/net", "dev") => without_counters(&text),
                    (_, "route") => routes(&text, |fields| fields.get(1) == Some(&"00000000"), 2),
                    (_, "ipv6_route") => routes(&text, |fields| fields.get(1) == Some(&"00"), 4),
                    _ => self.without(&text),
                }),
            };
            (self.without(&path), entry)
        });
        replaced.collect()
    }

    /// The text with each identity in it replaced.
    fn without(&mut self, text: &str) -> String {
        let mut replaced = String::with_capacity(text.len());
        let mut rest = text;
        let in_word = |c: char| c.is_ascii_alphanumeric() || c == ':' || c == '-';
        while !rest.is_empty() {
            let end = rest.find(|c| !in_word(c)).unwrap_or(rest.len());
            replaced.push_str(&self.word(&rest[..end]));
            let after = rest[end..].find(in_word).map_or(rest.len(), |next| end + next);
            replaced.push_str(&rest[end..after]);
            rest = &rest[after..];
        }
        replaced
    }

    fn word(&mut self, word: &str) -> String {
        // GPU-…, MIG-…
        let start = word.len().saturating_sub(36);
        if let Some((kind, uuid)) = word.split_at_checked(start).filter(|(_, uuid)| is_uuid(uuid)) {
            return format!("{kind}00000000-0000-0000-0000-{:012}", self.number(uuid));
        }
        let groups: Vec<&str> = word.split(':').collect();
        let all = |digits: usize| groups.iter().all(|group| group.len() == digits && is_hex(group));
        match groups.len() {
            // A GUID of a device or of its board.
            4 if all(4) => guid(self.number(word)),
            // A GID: a subnet and a port's GUID, or an address.
            8 if all(4) => self.gid(&groups),
            // The hardware address of Ethernet and of InfiniBand.
            6 | 20 if all(2) => {
                let number = self.number(word).to_be_bytes().map(|byte| format!("{byte:02x}"));
                let mut bytes = vec!["00".to_string(); groups.len()];
                bytes.splice(groups.len() - 4.., number.into_iter().skip(4));
                bytes.join(":")
            }
            // The same GUIDs, and hashes of the host's name, in NCCL's XML.
            1 if word.strip_prefix("0x").is_some_and(|hex| (9..=16).contains(&hex.len()) && is_hex(hex)) => {
                format!("0x{:016x}", self.number(word))
            }
            _ => word.into(),
        }
    }

    fn gid(&mut self, groups: &[&str]) -> String {
        let (subnet, port) = (groups[..4].join(":"), groups[4..].join(":"));
        // ::ffff:a.b.c.d of RoCE v2. Which addresses share a network is of use, which
        // they are is not: the first 24 bits become a number in 198.18.0.0/15, which is
        // nobody's (RFC 2544); 169.254 has a meaning.
        if subnet == "0000:0000:0000:0000" && port.starts_with("0000:ffff:") {
            let (high, low) = (groups[6], groups[7]);
            if high.eq_ignore_ascii_case("a9fe") {
                return format!("{subnet}:{port}");
            }
            let network = self.number(&format!("{high}:{}", &low[..2])) & 0x1ff;
            return format!("{subnet}:0000:ffff:{:04x}:{:02x}{}", 0xc612 | (network >> 8), network & 0xff, &low[2..]);
        }
        let prefix = if subnet.starts_with("fe80") || is_zero(&subnet) { subnet } else { guid(self.number(&subnet)) };
        format!("{prefix}:{}", guid(self.number(&port)))
    }

    /// 0 for what is zero: a slot that is empty.
    fn number(&mut self, identity: &str) -> u64 {
        if is_zero(identity.strip_prefix("0x").unwrap_or(identity)) {
            return 0;
        }
        let next = self.seen.len() as u64 + 1;
        *self.seen.entry(identity.to_ascii_lowercase()).or_insert(next)
    }
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_zero(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0' | b':' | b'-'))
}

fn is_uuid(text: &str) -> bool {
    let lengths = text.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12]) && text.split('-').all(is_hex)
}

fn guid(number: u64) -> String {
    let [a, b, c, d, e, f, g, h] = number.to_be_bytes();
    format!("{a:02x}{b:02x}:{c:02x}{d:02x}:{e:02x}{f:02x}:{g:02x}{h:02x}")
}

/// Lines NAME=VALUE of NCCL's file without comments, which may say anything, and
/// without values that are secret or name a host.
fn settings_without_secrets(text: &str) -> String {
    let secret = |name: &str| crate::report::is_secret(name) || matches!(name, "NCCL_COMM_ID" | "NCCL_HOSTID");
    let line = |line: &str| {
        let (name, value) = line.split_once('=').filter(|(name, _)| name.starts_with("NCCL_"))?;
        Some(if secret(name) { format!("{name}=(hidden)\n") } else { format!("{name}={value}\n") })
    };
    text.lines().filter_map(line).collect()
}

/// The names in /proc/net/dev, without what went over each.
fn without_counters(text: &str) -> String {
    let line = |line: &str| line.split_once(':').map(|(name, _)| format!("{name}: 0\n"));
    text.lines().filter_map(line).collect()
}

/// The heading and the default routes of a table, without the address of the router.
fn routes(text: &str, is_default: impl Fn(&[&str]) -> bool, router: usize) -> String {
    let line = |line: &str| {
        let mut fields: Vec<&str> = line.split_whitespace().collect();
        if fields.first() == Some(&"Iface") {
            return Some(format!("{line}\n"));
        }
        let zero = "0".repeat(fields.get(router)?.len());
        if !is_default(&fields) {
            return None;
        }
        fields[router] = &zero;
        Some(format!("{}\n", fields.join("\t")))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_replaced_alike_wherever_they_stand() {
        let mut identities = Identities::default();
        let uuid = "5d3a9c1e-0f42-11ee-be56-0242ac120002";
        let text = format!("Model: \t NVIDIA H100\nGPU UUID: \t GPU-{uuid}\nBus Location: \t 0000:1b:00.0\n");
        let expected = "Model: \t NVIDIA H100\nGPU UUID: \t GPU-00000000-0000-0000-0000-000000000001\n\
                        Bus Location: \t 0000:1b:00.0\n";
        assert_eq!(identities.without(&text), expected);
        assert_eq!(identities.without(&format!("MIG-{uuid}")), "MIG-00000000-0000-0000-0000-000000000001");
        for (text, expected) in [
            ("9803:9b03:00aa:bbcc\n", "0000:0000:0000:0002\n"),
            ("0000:0000:0000:0000", "0000:0000:0000:0000"),
            ("fe80:0000:0000:0000:9803:9b03:00AA:bbcc", "fe80:0000:0000:0000:0000:0000:0000:0002"),
            ("a0:88:c2:4d:15:1e", "00:00:00:00:00:03"),
            ("00:00:00:00:00:00", "00:00:00:00:00:00"),
            (
                "<net guid=\"0xa088c20300aabbcc\" speed=\"400000\"/>",
                "<net guid=\"0x0000000000000004\" speed=\"400000\"/>",
            ),
            ("0x10de\n", "0x10de\n"),
            ("0-55,112-167", "0-55,112-167"),
            ("ffff:ff:01.0", "ffff:ff:01.0"),
            ("400 Gb/sec (4X NDR)", "400 Gb/sec (4X NDR)"),
            ("MT_0000000838", "MT_0000000838"),
            (
                "GPU UUID: \t GPU-????????-????-????-????-????????????",
                "GPU UUID: \t GPU-????????-????-????-????-????????????",
            ),
            ("", ""),
            ("\u{fffd}ä-", "\u{fffd}ä-"),
        ] {
            assert_eq!(identities.without(text), expected);
        }
    }

    /// A guest of Hyper-V has a UUID above each device.
    #[test]
    fn identities_in_paths_are_replaced_with_the_links_to_them() {
        let (one, two) = ("47505500-0001-0000-3130-444531303030", "f4a3b2c1-0002-0000-3130-444531303030");
        let device = |uuid: &str| format!("sys/devices/VMBUS:00/{uuid}/pci0001:00/0001:00:00.0");
        let entries = BTreeMap::from([
            ("sys/bus/pci/devices/0001:00:00.0".into(), Entry::Link(format!("../../../../{}", device(two)))),
            (format!("{}/numa_node", device(one)), Entry::File("1\n".into())),
            (format!("{}/numa_node", device(two)), Entry::File("0\n".into())),
        ]);
        let replaced = Identities::default().replace(entries);
        let name = |number: u32| device(&format!("00000000-0000-0000-0000-{number:012}"));
        let link = Entry::Link(format!("../../../../{}", name(1)));
        assert_eq!(replaced["sys/bus/pci/devices/0001:00:00.0"], link);
        assert_eq!(replaced[&format!("{}/numa_node", name(1))], Entry::File("0\n".into()));
        assert_eq!(replaced[&format!("{}/numa_node", name(2))], Entry::File("1\n".into()));
        assert_eq!(Identities::default().replace(replaced.clone()), replaced);
    }

    /// Rows of one network stay rows of one network.
    #[test]
    fn addresses_keep_their_networks_and_nothing_else() {
        let mut identities = Identities::default();
        let mapped = |address: &str| format!("0000:0000:0000:0000:0000:ffff:{address}");
        for (address, expected) in [
            ("0a01:020d", "c612:010d"),
            ("0a01:020e", "c612:010e"),
            ("0a01:030d", "c612:020d"),
            ("a9fe:0701", "a9fe:0701"),
        ] {
            assert_eq!(identities.without(&mapped(address)), mapped(expected));
        }
    }

    #[test]
    fn nccl_s_file_and_the_routes_lose_what_is_nobody_s_business() {
        let conf =
            "# ask admin@example.org\nNCCL_IB_HCA==mlx5_0\nNCCL_COMM_ID=login1:4711\nHF_TOKEN=x\nNCCL_X_TOKEN=y\n";
        assert_eq!(
            settings_without_secrets(conf),
            "NCCL_IB_HCA==mlx5_0\nNCCL_COMM_ID=(hidden)\nNCCL_X_TOKEN=(hidden)\n"
        );
        let entries = BTreeMap::from([(
            "proc/net/route".to_string(),
            Entry::File(
                "Iface\tDestination\tGateway\neth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\n\
                 ib0\t0000010A\t00000000\t0001\n"
                    .into(),
            ),
        )]);
        let entries = Identities::default().replace(entries);
        let Entry::File(text) = &entries["proc/net/route"] else { panic!() };
        assert_eq!(text, "Iface\tDestination\tGateway\neth0\t00000000\t00000000\t0003\t0\t0\t100\t00000000\n");
    }
}
