//! Who belongs to this launch: the store key, from the environment or from a file; and,
//! for ranks of one host without a key, whose process is at the other end of a loopback
//! connection. The key is never printed: errors say what is wrong with it, not what it is.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use palingenesis::act::key::Key;
use palingenesis::facts::Environment;
use palingenesis::plan::worker::STORE_KEY;
use palingenesis::system::user::effective_uid;

use super::super::CommError;

/// How to get a key where no plugin gives one.
const MAKE: &str = "make one with: (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > FILE)";

/// The store key: PALINGENESIS_STORE_KEY, else the file that `comm.key_file` names. `None`:
/// all ranks are on one host, which needs none; `local_world_size` is how many are on this
/// one, where that is known.
///
/// # Errors
/// A key that is none, a file that others may read, and several hosts without a key.
pub fn store_key(
    environment: &Environment,
    file: Option<&Path>,
    world_size: u32,
    local_world_size: Option<u32>,
) -> Result<Option<Key>, CommError> {
    if let Some(text) = environment.get(STORE_KEY) {
        let cure = "srun --palingenesis=worker sets it; unset it to use comm.key_file";
        return parse(text).map(Some).map_err(|why| CommError::Refused(format!("{STORE_KEY} {why}; {cure}")));
    }
    if let Some(file) = file {
        let shown = file.display();
        return read(file).map(Some).map_err(|why| CommError::Refused(format!("comm.key_file={shown} {why}")));
    }
    match local_world_size {
        Some(local) if local < world_size => Err(no_key(&format!("{world_size} ranks, {local} of them on this host"))),
        _ => Ok(None),
    }
}

/// Refuses ranks that could not tell each other from strangers.
pub(super) fn no_key(who: &str) -> CommError {
    CommError::Refused(format!(
        "{who}, but no store key: without one anybody who reaches the port could pose as a rank; start it with srun \
         --palingenesis=worker, which makes a key, or name a file that all nodes share in comm.key_file ({MAKE})"
    ))
}

fn parse(text: &str) -> Result<Key, String> {
    let text = text.trim();
    let key = Key::from_hex(text).ok_or_else(|| match text.len() {
        0 => "is empty".to_owned(),
        64 => "has characters that are no hexadecimal digits".to_owned(),
        length => format!("has {length} characters, not 64 hexadecimal digits"),
    })?;
    if text.as_bytes().chunks(2).all(|pair| pair.eq_ignore_ascii_case(&text.as_bytes()[..2])) {
        return Err("is one byte again and again, which anybody can guess".to_owned());
    }
    Ok(key)
}

/// A file that is this user's alone.
fn read(path: &Path) -> Result<Key, String> {
    let mut file = match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return Err("is a symbolic link, which others may turn to another file; name the file itself".to_owned());
        }
        Err(error) => return Err(format!("cannot be read: {error}; {MAKE}")),
    };
    check(&file)?;
    let mut text = String::new();
    // More than any key with its line's end.
    (&mut file).take(256).read_to_string(&mut text).map_err(|error| format!("cannot be read: {error}; {MAKE}"))?;
    parse(&text).map_err(|why| format!("{why}; {MAKE}"))
}

fn check(file: &File) -> Result<(), String> {
    let is = file.metadata().map_err(|error| format!("cannot be looked at: {error}"))?;
    let own = effective_uid();
    if !is.is_file() {
        return Err(format!("is no regular file; {MAKE}"));
    }
    if is.uid() != own {
        return Err(format!("belongs to user {}, not to you (user {own}); copy it, as yourself", is.uid()));
    }
    let mode = is.mode() & 0o7777;
    if mode & 0o7177 != 0 {
        return Err(format!("has mode {mode:04o}, so others may know it; make a new one with mode 0600 ({MAKE})"));
    }
    Ok(())
}

/// Whether this is an address of this host: only those can be bound.
pub(super) fn is_here(ip: IpAddr) -> bool {
    UdpSocket::bind(SocketAddr::new(ip, 0)).is_ok()
}

/// Whether the other end of this loopback connection is a process of this user's.
///
/// # Errors
/// Whose it is, or that the kernel does not tell.
pub(super) fn is_own(stream: &TcpStream) -> Result<(), String> {
    let ends = stream.peer_addr().and_then(|peer| Ok((peer, stream.local_addr()?)));
    let (there, here) = ends.map_err(|error| format!("it is over: {error}"))?;
    let own = effective_uid();
    match user_of(there, here) {
        Some(user) if user == own => Ok(()),
        Some(user) => Err(format!("it is user {user}'s")),
        None => Err("/proc/net/tcp does not tell whose it is".to_owned()),
    }
}

/// Whose socket is bound to `local` and connected to `remote`, both on this host.
fn user_of(local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
        let mut text = String::new();
        // A host with a hundred thousand connections has a table of 15 MB.
        File::open(table).ok()?.take(64 << 20).read_to_string(&mut text).ok()?;
        find(&text, local, remote)
    })
}

/// The line of the kernel's table (Documentation/networking/proc_net_tcp.rst).
fn find(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    let (local, remote) = (normal(local), normal(remote));
    table.lines().skip(1).find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is = |word: usize, wanted| words.get(word).and_then(|text| address(text)) == Some(wanted);
        // A socket that nobody has accepted, or whose process has closed it, has no owner.
        let owned = *words.get(9)? != "0";
        (owned && is(1, local) && is(2, remote)).then(|| words.get(7)?.parse().ok()).flatten()
    })
}

fn normal(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// "0100007F:0CEA": words of 32 bits in the machine's byte order, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let mut bytes = Vec::new();
    for at in (0..ip.len()).step_by(8) {
        bytes.extend_from_slice(&u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    }
    let ip = match <[u8; 16]>::try_from(bytes.as_slice()) {
        Ok(six) => IpAddr::from(six).to_canonical(),
        Err(_) => IpAddr::from(<[u8; 4]>::try_from(bytes.as_slice()).ok()?),
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn the_other_end_s_user_is_found() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(any) else {
                eprintln!("SKIPPED: no IPv6 on this machine");
                continue;
            };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert!(is_own(&client).is_err(), "nobody has accepted it");
            let (server, _) = listener.accept().unwrap();
            assert_eq!((is_own(&client), is_own(&server)), (Ok(()), Ok(())));
        }
    }

    /// The table as the kernel's documentation describes it.
    #[test]
    fn the_kernel_s_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             \x20  0: 0100007F:0CEA 00000000:0000 0A 00000000:00000000 00:00000000 00000000   116        0 33335 1\n\
             \x20  1: 0100007F:7148 0100007F:0CEA 01 00000000:00000000 00:00000000 00000000  1001        0 41234 1\n\
             \x20  2: 0000000000000000FFFF00000100007F:0CEA 0000000000000000FFFF00000100007F:7149 01 00000000:00000000 00:00000000 00000000  7        0 0 1\n";
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(find(table, at(0x7148), at(0x0cea)), Some(1001));
        assert_eq!(find(table, at(0x0cea), at(0x7148)), None, "another line");
        assert_eq!(find(table, at(0x0cea), at(0x7149)), None, "a socket without an owner");
        assert_eq!(find("", at(1), at(2)), None);
        assert_eq!(address("nonsense"), None);
    }

    #[test]
    fn this_host_s_addresses_are_known() {
        assert!(is_here([127, 0, 0, 1].into()));
        assert!(is_here([127, 0, 1, 1].into()));
        assert!(!is_here([192, 0, 2, 1].into()), "TEST-NET-1 of RFC 5737 is nobody's");
    }
}
