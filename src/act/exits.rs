//! The records of ranks that ended badly, between the nodes and srun. srun listens and
//! accepts nothing while the step runs: the kernel keeps what comes, and srun reads it
//! at its end. A node's message is one frame, authenticated with a key of this launch:
//!
//! ```text
//! "PGX1"  4 bytes
//! length  2 bytes, big endian
//! record  that many bytes of JSON
//! tag     32 bytes, HMAC-SHA256 of all before
//! ```

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use super::key::{Key, LENGTH, Tag};
use crate::facts::exit::ExitRecord;
use crate::system::sockets;

/// What the launch's key is derived for.
pub const PURPOSE: &str = "exits";

const MAGIC: &[u8; 4] = b"PGX1";
const HEAD: usize = MAGIC.len() + 2;
/// The longest frame.
const MOST: usize = 1024;
/// The longest record.
const MOST_RECORD: usize = MOST - HEAD - LENGTH;

/// How many ports of a range are tried.
const TRIES: u32 = 64;
/// How many connections are read at the end.
const MOST_CONNECTIONS: usize = 8192;
/// How many of those may have sent nothing yet.
const MOST_SILENT: usize = 128;
/// How long reading takes at most.
const READING: Duration = Duration::from_secs(1);
/// How long one that has sent nothing yet is waited for.
const SILENCE: Duration = Duration::from_millis(200);

/// Where srun is, and by what it knows its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Numeric.
    pub address: SocketAddr,
    /// Of this launch and for this purpose.
    pub key: Key,
}

impl Destination {
    /// From what srun handed over: ADDRESS:PORT and the launch's secret.
    pub fn parse(address: &str, secret: &str) -> Option<Destination> {
        let address: SocketAddr = address.parse().ok()?;
        let key = Key::from_hex(secret)?.derive(PURPOSE);
        (address.port() != 0 && !address.ip().is_unspecified()).then_some(Destination { address, key })
    }
}

/// The frame of a record. A line that does not fit is cut.
fn frame(record: &ExitRecord, key: &Key) -> io::Result<Vec<u8>> {
    let mut json = serde_json::to_vec(record)?;
    let mut record = record.clone();
    while json.len() > MOST_RECORD {
        let Some(line) = record.line.as_mut().filter(|line| !line.is_empty()) else {
            return Err(io::Error::other("the record is too long"));
        };
        let mut half = line.len() / 2;
        while !line.is_char_boundary(half) {
            half -= 1;
        }
        line.truncate(half);
        json = serde_json::to_vec(&record)?;
    }
    let mut frame = MAGIC.to_vec();
    frame.extend(u16::try_from(json.len()).unwrap_or(u16::MAX).to_be_bytes());
    frame.extend(json);
    let tag = key.tag(&[&frame]);
    frame.extend(tag);
    Ok(frame)
}

/// What a frame holds so far.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Record(Box<ExitRecord>),
    /// It is not whole.
    More,
    /// It is none of ours.
    Strange,
}

fn read(bytes: &[u8], key: &Key) -> Heard {
    if !MAGIC.starts_with(&bytes[..bytes.len().min(MAGIC.len())]) {
        return Heard::Strange;
    }
    let Some(length) = bytes.get(MAGIC.len()..HEAD) else { return Heard::More };
    let end = HEAD + usize::from(u16::from_be_bytes([length[0], length[1]]));
    if end > HEAD + MOST_RECORD || bytes.len() > end + LENGTH {
        return Heard::Strange;
    }
    let Some(tag) = bytes.get(end..end + LENGTH).and_then(|tag| Tag::try_from(tag).ok()) else { return Heard::More };
    if !key.verify(&[&bytes[..end]], &tag) {
        return Heard::Strange;
    }
    // Ours, but perhaps not for a terminal: what the program of a rank could have written.
    match serde_json::from_slice::<ExitRecord>(&bytes[HEAD..end]) {
        Ok(record) if plain(&record) => Heard::Record(Box::new(record)),
        _ => Heard::Strange,
    }
}

/// Whether a record's texts are one line each.
fn plain(record: &ExitRecord) -> bool {
    let texts = [Some(&record.node), record.gpu.as_ref(), record.line.as_ref()];
    texts.into_iter().flatten().all(|text| !text.chars().any(char::is_control))
}

/// Sends a record and waits until srun's kernel has it.
///
/// # Errors
/// When that was not in time.
pub fn send(to: &Destination, record: &ExitRecord, limit: Duration) -> io::Result<()> {
    let end = Instant::now() + limit;
    let frame = frame(record, &to.key)?;
    let mut stream = TcpStream::connect_timeout(&to.address, limit)?;
    stream.set_nonblocking(true)?;
    // The socket's buffer is empty, and holds more than a frame.
    if stream.write(&frame)? != frame.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    // With a full backlog the kernel says it has connected and takes nothing. (The end of
    // the stream is not waited for: the other side takes 40 ms to say that it has it.)
    while sockets::unsent(&stream)? != 0 {
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        if Instant::now() >= end {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// The address of this host from which packets go to `target`, and so the one by which
/// `target` reaches it. No packet is sent.
pub fn address_towards(target: IpAddr) -> Option<IpAddr> {
    // The discard port.
    let own = sockets::source((target, 9).into())?;
    // One of a link needs the link's name.
    let of_a_link = matches!(own, IpAddr::V6(own) if own.is_unicast_link_local());
    (!own.is_unspecified() && !of_a_link).then_some(own)
}

/// srun's end.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    key: Key,
}

impl Listener {
    /// Listens at this address of this host, at a port of the range where there is one.
    /// No program that this one starts inherits it.
    ///
    /// # Errors
    /// When no port that was tried is free.
    pub fn open(address: IpAddr, ports: Option<RangeInclusive<u16>>, secret: &Key, seed: u32) -> io::Result<Listener> {
        let socket = match ports {
            None => sockets::listen((address, 0).into(), true)?,
            Some(ports) => listen_at_one_of(address, ports, seed)?,
        };
        Ok(Listener { socket, key: secret.derive(PURPOSE) })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Reads what has come, one record for each rank, and ends. Whoever sends anything
    /// else is dropped; nobody is waited for longer than a second in all.
    pub fn collect(self) -> Vec<ExitRecord> {
        let start = Instant::now();
        let mut records: Vec<ExitRecord> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        let mut take = |heard: Heard| match heard {
            Heard::More => true,
            Heard::Record(record) => {
                if seen.insert(record.rank) {
                    records.push(*record);
                }
                false
            }
            Heard::Strange => false,
        };
        let mut silent: Vec<Caller> = Vec::new();
        for _ in 0..MOST_CONNECTIONS {
            let stream = match self.socket.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                // None is left; or no descriptor.
                Err(_) => break,
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let mut caller = Caller { stream, bytes: Vec::new() };
            if take(caller.hear(&self.key)) && silent.len() < MOST_SILENT {
                silent.push(caller);
            }
            if start.elapsed() >= READING {
                break;
            }
        }
        // No more: who comes now is told so.
        drop(self.socket);
        let end = (start + READING).min(Instant::now() + SILENCE);
        while !silent.is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
            silent.retain_mut(|caller| take(caller.hear(&self.key)));
        }
        records
    }
}

fn listen_at_one_of(address: IpAddr, ports: RangeInclusive<u16>, seed: u32) -> io::Result<TcpListener> {
    let (first, last) = (u32::from(*ports.start()), u32::from(*ports.end()));
    let count = last.saturating_sub(first) + 1;
    let mut outcome = Err(io::ErrorKind::AddrInUse.into());
    for attempt in 0..TRIES.min(count) {
        let port = first + (seed % count + attempt) % count;
        outcome = sockets::listen((address, u16::try_from(port).unwrap_or(0)).into(), true);
        match &outcome {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            _ => return outcome,
        }
    }
    outcome
}

/// Somebody who has connected.
struct Caller {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Caller {
    /// Reads what is there without waiting.
    fn hear(&mut self, key: &Key) -> Heard {
        let mut buffer = [0; MOST + 1];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    // It has said all it has to say.
                    return match read(&self.bytes, key) {
                        Heard::More => Heard::Strange,
                        heard => heard,
                    };
                }
                Ok(length) => self.bytes.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return read(&self.bytes, key),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Heard::Strange,
            }
            if self.bytes.len() > MOST {
                return Heard::Strange;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::exit::{Ended, Oom};
    use std::net::{Ipv4Addr, Ipv6Addr};

    const LONG: Duration = Duration::from_secs(20);
    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn record(rank: u32) -> ExitRecord {
        ExitRecord {
            rank,
            node: format!("node{rank:03}"),
            node_rank: rank / 8,
            local_rank: rank % 8,
            gpu: Some("0000:3b:00.0".into()),
            kind: Ended::Signal(11),
            time_ns: 1_700_000_000_123_456_789,
            oom: Oom::Unknown,
            clock: Some((-1_500, 20)),
            line: None,
        }
    }

    fn pair() -> (Listener, Destination) {
        let secret = Key::new().unwrap();
        let listener = Listener::open(HERE, None, &secret, 0).unwrap();
        let address = listener.address().unwrap().to_string();
        let destination = Destination::parse(&address, &secret.to_hex()).unwrap();
        (listener, destination)
    }

    #[test]
    fn nobody_accepts_until_the_end_and_every_record_is_there() {
        let (listener, to) = pair();
        let sent: Vec<ExitRecord> = (0..300).map(record).collect();
        for record in &sent {
            send(&to, record, LONG).unwrap();
        }
        assert_eq!(listener.collect(), sent);
        // Nobody listens any more.
        assert!(send(&to, &record(1), LONG).is_err());
    }

    #[test]
    fn both_families_and_a_port_of_the_range() {
        let secret = Key::new().unwrap();
        // One that is taken, and its neighbour.
        let taken = TcpListener::bind((HERE, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(Listener::open(HERE, Some(port..=port), &secret, 7).is_err());
        let range = port.saturating_sub(40)..=port;
        let listener = Listener::open(HERE, Some(range.clone()), &secret, u32::from(port)).unwrap();
        let got = listener.address().unwrap().port();
        assert!(range.contains(&got) && got != port, "{got} of {range:?}");
        match Listener::open(Ipv6Addr::LOCALHOST.into(), None, &secret, 0) {
            Ok(listener) => {
                let to = Destination::parse(&listener.address().unwrap().to_string(), &secret.to_hex()).unwrap();
                send(&to, &record(3), LONG).unwrap();
                assert_eq!(listener.collect(), [record(3)]);
            }
            Err(error) => println!("skipped: no IPv6 here: {error}"),
        }
    }

    #[test]
    fn strangers_and_replays_are_not_believed() {
        let (listener, to) = pair();
        let stranger = Destination { key: Key::new().unwrap().derive(PURPOSE), ..to.clone() };
        send(&stranger, &record(1), LONG).unwrap();
        let whole = frame(&record(2), &to.key).unwrap();
        let say = |bytes: &[u8]| TcpStream::connect(to.address).unwrap().write_all(bytes).unwrap();
        // Another record under the tag of the first.
        let mut changed = whole.clone();
        let at = changed.windows(7).position(|seven| seven == b"node002").unwrap();
        changed[at + 6] = b'9';
        say(&changed);
        say(b"GET / HTTP/1.1\r\n\r\n");
        say(&whole[..whole.len() - 1]);
        say(&[&whole[..], b"x"].concat());
        say(&[0xff; 100_000]);
        send(&to, &record(2), LONG).unwrap();
        let other_end = ExitRecord { kind: Ended::Exit(1), ..record(2) };
        send(&to, &other_end, LONG).unwrap();
        let escape = ExitRecord { node: "\u{1b}[31mnode".into(), ..record(4) };
        send(&to, &escape, LONG).unwrap();
        assert_eq!(listener.collect(), [record(2)]);
    }

    #[test]
    fn callers_that_say_nothing_cost_a_second_at_most() {
        let (listener, to) = pair();
        let silent: Vec<TcpStream> = (0..300).filter_map(|_| TcpStream::connect(to.address).ok()).collect();
        send(&to, &record(5), LONG).unwrap();
        let start = Instant::now();
        assert_eq!(listener.collect(), [record(5)]);
        assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
        drop(silent);
    }

    #[test]
    fn one_that_is_slow_is_heard() {
        let (listener, to) = pair();
        let whole = frame(&record(6), &to.key).unwrap();
        let mut slow = TcpStream::connect(to.address).unwrap();
        slow.write_all(&whole[..10]).unwrap();
        let late = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            slow.write_all(&whole[10..]).unwrap();
            slow
        });
        assert_eq!(listener.collect(), [record(6)]);
        drop(late.join().unwrap());
    }

    /// With one place in it the kernel keeps two connections (net/core/sock.h,
    /// sk_acceptq_is_full) and lets others believe that they have one.
    #[test]
    fn a_full_backlog_is_not_taken_for_delivery() {
        let (listener, to) = pair();
        sockets::keep(&listener.socket, 1);
        let sent = (0..6).filter(|rank| send(&to, &record(*rank), Duration::from_millis(150)).is_ok()).count();
        let got = listener.collect().len();
        assert!(sent >= 1 && sent <= got, "{sent} sent, {got} received");
        assert!(sent < 6, "the backlog was not full");
    }

    #[test]
    fn a_long_line_is_cut_and_a_frame_never_longer_than_it_may_be() {
        let key = Key::new().unwrap();
        for line in ["x".repeat(5000), "\\\"".repeat(600), "ä".repeat(511)] {
            let long = ExitRecord { line: Some(line.clone()), ..record(1) };
            let bytes = frame(&long, &key).unwrap();
            assert!(bytes.len() <= MOST);
            let Heard::Record(got) = read(&bytes, &key) else { panic!("{line}") };
            let kept = got.line.clone().unwrap();
            assert!(kept.len() > 200 && line.starts_with(&kept), "{kept}");
            assert_eq!(ExitRecord { line: None, ..*got }, record(1));
        }
        assert!(frame(&ExitRecord { node: "n".repeat(MOST), ..record(1) }, &key).is_err());
    }

    #[test]
    fn where_srun_is_and_where_it_cannot_be() {
        let secret = "07".repeat(32);
        let found = |address: &str| Destination::parse(address, &secret).map(|to| to.address.to_string());
        assert_eq!(found("10.1.2.3:61000").as_deref(), Some("10.1.2.3:61000"));
        assert_eq!(found("[2001:db8::1]:61000").as_deref(), Some("[2001:db8::1]:61000"));
        for address in ["", "10.1.2.3", "10.1.2.3:0", "0.0.0.0:5", "login:61000", "10.1.2.3:66000"] {
            assert_eq!(found(address), None, "{address}");
        }
        assert_eq!(Destination::parse("10.1.2.3:61000", "07"), None);
        assert_eq!(address_towards(HERE), Some(HERE));
    }
}
