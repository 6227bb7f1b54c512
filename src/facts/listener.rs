//! Who listens on a TCP port of this machine, as far as procfs tells this user.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::files;

/// The most bytes read of the kernel's table of sockets.
const TABLE: u64 = 4 << 20;

/// The most processes looked at.
const PROCESSES: usize = 20_000;

/// What is known of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listener {
    /// Process and its name: of this user's own processes, for root of all.
    pub process: Option<(u32, String)>,
    /// The user whose socket it is.
    pub user: Option<u32>,
}

/// Who listens on `port`, below `root`.
pub fn of(root: &Path, port: u16) -> Listener {
    let socket = ["proc/net/tcp", "proc/net/tcp6"].iter().find_map(|table| {
        let text = files::regular(&root.join(table), TABLE).ok().flatten()?;
        listening(&String::from_utf8_lossy(&text), port)
    });
    match socket {
        Some((user, inode)) => Listener { process: process(root, inode), user: Some(user) },
        None => Listener::default(),
    }
}

/// User and inode of the socket that listens on `port`, in the kernel's table
/// (Documentation/networking/proc_net_tcp.rst).
fn listening(table: &str, port: u16) -> Option<(u32, u64)> {
    let ends = format!(":{port:04X}");
    table.lines().skip(1).find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, state) = (words.get(1)?, words.get(3)?);
        (local.ends_with(&ends) && *state == "0A")
            .then(|| Some((words.get(7)?.parse().ok()?, words.get(9)?.parse().ok()?)))
            .flatten()
    })
}

fn process(root: &Path, inode: u64) -> Option<(u32, String)> {
    let wanted = format!("socket:[{inode}]");
    let entries = fs::read_dir(root.join("proc")).ok()?.take(PROCESSES).flatten();
    for entry in entries {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = fs::read_dir(entry.path().join("fd")) else { continue };
        let holds = descriptors
            .take(PROCESSES)
            .flatten()
            .any(|open| fs::read_link(open.path()).is_ok_and(|to| to.as_os_str().as_bytes() == wanted.as_bytes()));
        if holds {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            return Some((pid, crate::config::printable(name.trim())));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn this_process_is_found_by_its_port() {
        let own = TcpListener::bind("127.0.0.1:0").unwrap();
        let found = of(Path::new("/"), own.local_addr().unwrap().port());
        assert_eq!(found.process.map(|(pid, _)| pid), Some(std::process::id()));
        assert!(found.user.is_some());
        assert_eq!(of(Path::new("/nonexistent"), 1), Listener::default());
    }

    /// The table as the kernel's documentation describes it.
    #[test]
    fn the_kernel_s_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             \x20  0: 0100007F:0CEA 00000000:0000 0A 00000000:00000000 00:00000000 00000000   116        0 33335 1\n\
             \x20  1: 0100007F:7148 0100007F:0CEA 01 00000000:00000000 00:00000000 00000000  1001        0 41234 1\n";
        assert_eq!(listening(table, 0x0cea), Some((116, 33335)));
        assert_eq!(listening(table, 0x7148), None);
        assert_eq!(listening("", 1), None);
    }
}
