//! The flight recorder: a rank's last 1,024 operations in a mapped file, which is there
//! after the process was killed; and what the files of several ranks say together. Writing
//! costs two stores and two looks at the clock for each operation. Reading trusts nothing.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, compiler_fence};

use memmap2::MmapMut;
use palingenesis::config::printable;
use palingenesis::system::clock;

use super::control::{operation, ranks, s};
use super::{Op, Tag};

/// Operations that are kept.
pub const KEPT: usize = 1024;

/// ```text
/// header   "PLGrecrd", version (4), bytes of a record (4), records (4), rank (4),
///          world size (4), process (4), made at (8), length of host (1), host (63), zeros
/// record   sequence (8), count (8), start (8), end (8), index (4), op (1), dtype (1),
///          state (1), length of tag (1), tag (24)
/// ```
/// Numbers are little-endian, times nanoseconds of CLOCK_REALTIME.
const MAGIC: &[u8; 8] = b"PLGrecrd";
const VERSION: u32 = 1;
const HEADER: usize = 128;
const HOST: usize = 63;
const RECORD: usize = 64;
const WHAT: usize = 24;
const FILE: usize = HEADER + KEPT * RECORD;

/// Where in a record.
const STATE: usize = 38;

const EMPTY: u8 = 0;
const ENTERED: u8 = 1;
const LEFT: u8 = 2;

/// The longest file that is read.
const LONGEST: u64 = 1 << 20;

const OPS: [Op; 6] = [Op::AllGather, Op::ReduceScatter, Op::AllReduce, Op::Broadcast, Op::Barrier, Op::Exchange];

/// What an operation's numbers are: collectives carry f32, the others bytes.
const F32: u8 = 1;
const BYTES: u8 = 2;

fn dtype(op: Op) -> u8 {
    match op {
        Op::AllGather | Op::ReduceScatter | Op::AllReduce => F32,
        Op::Broadcast | Op::Exchange => BYTES,
        Op::Barrier => 0,
    }
}

/// A rank's own file, written to while it runs.
#[derive(Debug)]
pub struct Recorder {
    map: MmapMut,
    /// Operations so far.
    next: usize,
}

impl Recorder {
    /// Begins a file, for this user alone. One that is there, of the run before, is kept as
    /// `PATH.old`: after a restart it says what the killed run was at.
    ///
    /// # Errors
    /// When the file cannot be made; a full disk says so here, not later.
    pub fn create(path: &Path, rank: u32, world_size: u32, host: &str) -> io::Result<Recorder> {
        let mut old = path.as_os_str().to_owned();
        old.push(".old");
        match fs::rename(path, &old) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let mut bytes = vec![0; FILE];
        let host = cut(host, HOST);
        let numbers = [VERSION, RECORD as u32, KEPT as u32, rank, world_size, std::process::id()];
        bytes[..8].copy_from_slice(MAGIC);
        for (at, number) in numbers.iter().enumerate() {
            bytes[8 + 4 * at..][..4].copy_from_slice(&number.to_le_bytes());
        }
        bytes[32..40].copy_from_slice(&clock::now().to_le_bytes());
        bytes[40] = host.len() as u8;
        bytes[41..][..host.len()].copy_from_slice(host.as_bytes());
        // Written, not only made long: a store to a page that a full disk has no room for
        // would end the process.
        file.write_all(&bytes)?;
        file.sync_all()?;
        // SAFETY: the file is new and this user's alone. Were it cut short while it is mapped,
        // the next store would end this process (SIGBUS), and nothing worse.
        let map = unsafe { MmapMut::map_mut(&file)? };
        Ok(Recorder { map, next: 0 })
    }

    fn record(&mut self, number: usize) -> &mut [u8] {
        let at = HEADER + number % KEPT * RECORD;
        &mut self.map[at..at + RECORD]
    }

    /// An operation begins. The state is written last: a process that is killed in the
    /// middle leaves an empty record, not a wrong one.
    pub fn enter(&mut self, sequence: u64, op: Op, tag: Tag, count: u64) {
        let record = self.record(self.next);
        record[STATE] = EMPTY;
        compiler_fence(Ordering::SeqCst);
        for (at, number) in [sequence, count, clock::now(), 0].iter().enumerate() {
            record[8 * at..][..8].copy_from_slice(&number.to_le_bytes());
        }
        record[32..36].copy_from_slice(&tag.index.to_le_bytes());
        record[36] = op as u8;
        record[37] = dtype(op);
        let what = cut(tag.what, WHAT);
        record[39] = what.len() as u8;
        record[40..][..what.len()].copy_from_slice(what.as_bytes());
        compiler_fence(Ordering::SeqCst);
        record[STATE] = ENTERED;
        self.next += 1;
    }

    /// The last operation that began is over.
    pub fn leave(&mut self) {
        if let Some(last) = self.next.checked_sub(1) {
            self.end(last);
        }
    }

    /// The operation of this number is over: one of the last, though others began after it.
    pub fn over(&mut self, sequence: u64) {
        let first = self.next.saturating_sub(KEPT);
        let number = (first..self.next).rev().find(|number| self.record(*number)[..8] == sequence.to_le_bytes());
        if let Some(number) = number {
            self.end(number);
        }
    }

    fn end(&mut self, number: usize) {
        let record = self.record(number);
        record[24..32].copy_from_slice(&clock::now().to_le_bytes());
        compiler_fence(Ordering::SeqCst);
        record[STATE] = LEFT;
    }
}

/// As much as has room.
fn cut(text: &str, room: usize) -> &str {
    let mut end = text.len().min(room);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// An operation as it was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its number.
    pub sequence: u64,
    /// Its kind.
    pub op: Op,
    /// Its tag's word.
    pub what: String,
    /// Its tag's index.
    pub index: u32,
    /// Numbers or bytes of this rank.
    pub count: u64,
    /// What they are: 1 is f32, 2 bytes.
    pub dtype: u8,
    /// When it was entered, in nanoseconds since 1970 by the rank's own host.
    pub start: u64,
    /// When it was left; `None`: never.
    pub end: Option<u64>,
}

impl Entry {
    /// "all_gather #8812 of block 17".
    fn name(&self) -> String {
        operation(self.op.name(), self.sequence, &self.what, self.index)
    }

    /// The same with what it carried.
    fn with_count(&self) -> String {
        match self.dtype {
            F32 => format!("{} ({} f32)", self.name(), self.count),
            BYTES => format!("{} ({} byte{})", self.name(), self.count, s(self.count as usize)),
            _ => self.name(),
        }
    }
}

/// A rank's recording, read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flight {
    /// The rank.
    pub rank: u32,
    /// WORLD_SIZE.
    pub world_size: u32,
    /// Its host.
    pub host: String,
    /// Its process.
    pub process: u32,
    /// When it was begun, in nanoseconds since 1970.
    pub made: u64,
    /// Its last operations, oldest first.
    pub entries: Vec<Entry>,
}

/// Reads a recording, of a process that lives or is dead. Records that make no sense are
/// left out.
///
/// # Errors
/// When it is none: what it is instead.
pub fn read(path: &Path) -> Result<Flight, String> {
    let mut bytes = Vec::new();
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| error.to_string())?;
    if !file.metadata().map_err(|error| error.to_string())?.is_file() {
        return Err("no regular file".to_owned());
    }
    file.take(LONGEST).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    parse(&bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A text whose length stands before it.
fn text_at(bytes: &[u8], length_at: usize, at: usize, room: usize) -> Option<String> {
    let length = usize::from(*bytes.get(length_at)?);
    let text = bytes.get(at..at + length).filter(|_| length <= room)?;
    Some(printable(&String::from_utf8_lossy(text)))
}

fn parse(bytes: &[u8]) -> Result<Flight, String> {
    if bytes.get(..8) != Some(MAGIC) {
        return Err("no recording of palingenesis-worker".to_owned());
    }
    let short = "cut short";
    let [version, record, _, rank, world_size, process] =
        [0, 1, 2, 3, 4, 5].map(|number| u32_at(bytes, 8 + 4 * number)).map(|number| number.unwrap_or(0));
    if bytes.len() < HEADER {
        return Err(short.to_owned());
    }
    if version != VERSION || record as usize != RECORD {
        return Err(format!("recorded by another version (format {version}; this program reads {VERSION})"));
    }
    let host = text_at(bytes, 40, 41, HOST).ok_or("damaged at its head")?;
    let made = u64_at(bytes, 32).ok_or(short)?;
    let mut entries: Vec<Entry> = bytes[HEADER..].chunks_exact(RECORD).filter_map(entry).collect();
    entries.sort_by_key(|entry| (entry.sequence, entry.start));
    Ok(Flight { rank, world_size, host, process, made, entries })
}

fn entry(record: &[u8]) -> Option<Entry> {
    let state = *record.get(STATE)?;
    if state != ENTERED && state != LEFT {
        return None;
    }
    let number = *record.get(36)?;
    Some(Entry {
        sequence: u64_at(record, 0)?,
        op: OPS.into_iter().find(|op| *op as u8 == number)?,
        what: text_at(record, 39, 40, WHAT)?,
        index: u32_at(record, 32)?,
        count: u64_at(record, 8)?,
        dtype: *record.get(37)?,
        start: u64_at(record, 16)?,
        end: u64_at(record, 24).filter(|_| state == LEFT),
    })
}

/// What the recordings of one run's ranks say together: per rank the last operation, then
/// who never came, who waits in what, and where ranks were at different operations. Times
/// are of each rank's own host. For `palingenesis-worker recorder FILE...`.
///
/// # Errors
/// When none of the files is a recording: what each is instead, one line.
pub fn merge(files: &[PathBuf]) -> Result<String, String> {
    let (mut lines, mut faults) = (Vec::new(), Vec::new());
    let mut flights: BTreeMap<u32, (Flight, &Path)> = BTreeMap::new();
    for path in files {
        match read(path) {
            Err(why) => faults.push(format!("{}: {why}", path.display())),
            Ok(flight) => match flights.get(&flight.rank) {
                // Of two runs the later counts.
                Some((other, _)) if other.made >= flight.made => {
                    lines.push(format!("{} is left out: an earlier run of rank {}", path.display(), flight.rank));
                }
                other => {
                    if let Some((_, old)) = other {
                        lines.push(format!("{} is left out: an earlier run of rank {}", old.display(), flight.rank));
                    }
                    flights.insert(flight.rank, (flight, path));
                }
            },
        }
    }
    if flights.is_empty() {
        return Err(format!("no recording to read; {}", faults.join("; ")));
    }
    lines.extend(faults.into_iter().map(|fault| format!("{fault}; left out")));
    // A run of more ranks has left files that a later one of fewer does not replace.
    let newest = flights.values().max_by_key(|(flight, _)| flight.made);
    let world = newest.map_or(0, |(flight, _)| flight.world_size);
    let (flights, others): (Vec<_>, Vec<_>) = flights.into_values().partition(|(flight, _)| flight.world_size == world);
    lines.extend(others.iter().map(|(flight, path)| {
        format!("{} is left out: another run, of {} ranks and not {world}", path.display(), flight.world_size)
    }));
    let flights: Vec<Flight> = flights.into_iter().map(|(flight, _)| flight).collect();
    let today =
        flights.iter().filter_map(|flight| flight.entries.last()).map(|entry| entry.end.unwrap_or(entry.start)).max();
    let time = |ns: u64| clock::time_of_day(ns, today.unwrap_or(ns));
    lines.extend(flights.iter().map(|flight| {
        let at = match flight.entries.last() {
            None => "entered no operation".to_owned(),
            Some(last) => match last.end {
                None => format!("in {} since {}", last.with_count(), time(last.start)),
                Some(end) => {
                    let ms = end.saturating_sub(last.start) / 1_000_000;
                    format!("left {} at {}, after {ms} ms", last.with_count(), time(end))
                }
            },
        };
        format!("rank {} on {} (process {}): {at}", flight.rank, flight.host, flight.process)
    }));
    lines.extend(absent(&flights));
    lines.extend(differ(&flights));
    lines.extend(behind(&flights, &time));
    Ok(lines.join("\n") + "\n")
}

/// "rank 3 on n2", "ranks 3 5-7 on n2 n3".
fn who<'a>(flights: impl IntoIterator<Item = &'a Flight>) -> String {
    let flights: Vec<&Flight> = flights.into_iter().collect();
    let mut hosts: Vec<&str> = flights.iter().map(|flight| &*flight.host).collect();
    hosts.dedup();
    let more = if hosts.len() > 4 { " ..." } else { "" };
    hosts.truncate(4);
    format!("rank{} {} on {}{more}", s(flights.len()), ranks(flights.iter().map(|flight| flight.rank)), hosts.join(" "))
}

/// Ranks without a file.
fn absent(flights: &[Flight]) -> Option<String> {
    let world = flights.iter().map(|flight| flight.world_size).max()?;
    // As many as could have a file; a damaged head may claim any number.
    let missing =
        (0..world.min(1 << 20)).filter(|rank| flights.binary_search_by_key(rank, |flight| flight.rank).is_err());
    let missing: Vec<u32> = missing.collect();
    (!missing.is_empty()).then(|| format!("no recording of rank{} {} of {world}", s(missing.len()), ranks(missing)))
}

/// The first operation at which ranks were not at the same.
fn differ(flights: &[Flight]) -> Option<String> {
    let mut by_number: BTreeMap<u64, Vec<(&Flight, &Entry)>> = BTreeMap::new();
    for flight in flights {
        for entry in &flight.entries {
            by_number.entry(entry.sequence).or_default().push((flight, entry));
        }
    }
    // How much each exchanges or broadcasts is its own affair.
    let same = |a: &Entry, b: &Entry| {
        (a.op, &a.what, a.index) == (b.op, &b.what, b.index) && (a.dtype != F32 || a.count == b.count)
    };
    by_number.values().find_map(|all| {
        let (_, first) = all.first()?;
        let (other, theirs) = all.iter().find(|(_, entry)| !same(entry, first))?;
        let with_first = all.iter().filter(|(_, entry)| same(entry, first)).map(|(flight, _)| *flight);
        let at = format!("at {}", first.with_count());
        Some(format!("ranks differ: {} {at}, {} at {}", who(with_first), who([*other]), theirs.with_count()))
    })
}

/// Who keeps the others waiting.
fn behind(flights: &[Flight], time: &dyn Fn(u64) -> String) -> Vec<String> {
    let last = |flight: &Flight| flight.entries.last().map_or((0, false), |last| (last.sequence, last.end.is_none()));
    let top = flights.iter().filter_map(|flight| flight.entries.last()).max_by_key(|last| last.sequence);
    let Some(top) = top else { return vec!["no rank entered any operation".to_owned()] };
    let is = |inside: bool| {
        let here = flights.iter().filter(move |flight| last(flight) == (top.sequence, inside));
        here.collect::<Vec<&Flight>>()
    };
    let (inside, left) = (is(true), is(false));
    let since = |waiting: &[&Flight]| {
        let first = waiting.iter().filter_map(|flight| flight.entries.last()).map(|last| last.start).min();
        first.map(time).unwrap_or_default()
    };
    // Ranks that stay behind at one place are told together.
    let mut places: BTreeMap<(u64, bool), Vec<&Flight>> = BTreeMap::new();
    for flight in flights.iter().filter(|flight| last(flight).0 < top.sequence) {
        places.entry(last(flight)).or_default().push(flight);
    }
    let ahead = match (inside.is_empty(), left.is_empty()) {
        (false, _) if inside.len() == 1 => {
            format!("{} waits in it since {}", who(inside.iter().copied()), since(&inside))
        }
        (false, _) => format!("{} wait in it since {}", who(inside.iter().copied()), since(&inside)),
        (true, _) => format!("{} left it", who(left.iter().copied())),
    };
    let mut lines: Vec<String> = places
        .iter()
        .map(|((sequence, in_it), late)| {
            let ranks = who(late.iter().copied());
            let stuck = late.first().and_then(|flight| flight.entries.last()).filter(|_| *in_it);
            match stuck {
                Some(stuck) => {
                    let (name, is) = (stuck.name(), if late.len() == 1 { "is" } else { "are" });
                    format!("{ranks} {is} still in {name} since {}; others are at {}", since(late), top.name())
                }
                None if sequence.checked_add(1) == Some(top.sequence) => {
                    format!("{ranks} never entered {}; {ahead}", top.name())
                }
                None => format!(
                    "{ranks} never entered #{}; others are at {}: {ahead}",
                    sequence.saturating_add(1),
                    top.name()
                ),
            }
        })
        .collect();
    if lines.is_empty() {
        lines.push(match (inside.is_empty(), left.is_empty()) {
            (true, _) => format!("all left {}: none waits for another", top.name()),
            (false, true) => {
                format!("all are in {} since {}: what is missing is data, not a rank", top.name(), since(&inside))
            }
            (false, false) => {
                let (waiting, done) = (who(inside.iter().copied()), who(left.iter().copied()));
                let is = if inside.len() == 1 { "is" } else { "are" };
                format!("{waiting} {is} in {} since {}, which {done} left", top.name(), since(&inside))
            }
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("palingenesis-recorder-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn the_last_operations_come_back_and_the_run_before_is_kept() {
        let folder = folder("back");
        let path = folder.join("rank-3");
        let mut recorder = Recorder::create(&path, 3, 8, "n2").unwrap();
        for sequence in 1..=2000 {
            recorder.enter(sequence, Op::ReduceScatter, Tag::of("a word that is too long to be kept", 7), 123);
            recorder.leave();
        }
        recorder.enter(2001, Op::Barrier, Tag::of("step", 5), 0);
        // Not dropped: as a process that is still there, or was killed.
        let flight = read(&path).unwrap();
        assert_eq!((flight.rank, flight.world_size, &*flight.host), (3, 8, "n2"));
        assert_eq!(flight.process, std::process::id());
        assert_eq!(flight.entries.len(), KEPT);
        assert_eq!(flight.entries.first().unwrap().sequence, 2001 - KEPT as u64 + 1);
        let [.., before, last] = &*flight.entries else { panic!() };
        assert_eq!((last.name(), last.end), ("barrier #2001 of step 5".to_owned(), None));
        assert_eq!((&*before.what, before.count, before.dtype), ("a word that is too long ", 123, F32));
        assert!(before.end.unwrap() >= before.start && before.start >= flight.made);
        let again = Recorder::create(&path, 3, 8, "n2").unwrap();
        assert_eq!(read(&path).unwrap().entries, []);
        assert_eq!(read(&folder.join("rank-3.old")).unwrap().entries.len(), KEPT);
        drop(again);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_operation_is_over_by_its_number_while_others_go_on() {
        let folder = folder("beside");
        let mut recorder = Recorder::create(&folder.join("rank-0"), 0, 2, "n1").unwrap();
        for sequence in 1..=2000 {
            recorder.enter(sequence, Op::AllGather, Tag::of("block", 1), 10);
        }
        recorder.over(1998);
        // No record of it is left.
        recorder.over(3);
        let entries = read(&folder.join("rank-0")).unwrap().entries;
        let ended: Vec<u64> = entries.iter().filter(|entry| entry.end.is_some()).map(|entry| entry.sequence).collect();
        assert_eq!((entries.len(), ended), (KEPT, vec![1998]));
        fs::remove_dir_all(folder).unwrap();
    }

    /// PyTorch's own report of such a run ends in an internal assertion:
    /// <https://github.com/pytorch/pytorch/issues/105287>.
    #[test]
    fn any_bytes_are_read_without_a_panic() {
        let folder = folder("garbled");
        let path = folder.join("rank-0");
        let mut recorder = Recorder::create(&path, 0, 2, "n1").unwrap();
        recorder.enter(1, Op::AllGather, Tag::of("block", 0), 10);
        let good = fs::read(&path).unwrap();
        for end in (0..HEADER + 2 * RECORD).chain([good.len() - 1]) {
            let _ = parse(&good[..end]);
        }
        // Each byte of the head and of a record, with each of some values.
        for at in 0..HEADER + RECORD {
            for value in [0, 1, 2, 7, 0x7f, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                if let Ok(flight) = parse(&bytes) {
                    let alone = [flight];
                    let _ = (absent(&alone), behind(&alone, &|_| String::new()), differ(&alone));
                }
            }
        }
        let files: Vec<PathBuf> = [("empty", &b""[..]), ("text", b"nothing of ours"), ("short", &good[..100])]
            .map(|(name, bytes)| {
                fs::write(folder.join(name), bytes).unwrap();
                folder.join(name)
            })
            .into();
        let error = merge(&files).unwrap_err();
        assert!(
            error.contains("text: no recording of palingenesis-worker") && error.contains("short: cut short"),
            "{error}"
        );
        let all: Vec<PathBuf> = files.into_iter().chain([path, folder.join("missing"), folder.clone()]).collect();
        let text = merge(&all).unwrap();
        assert!(text.contains("in all_gather #1 of block 0 (10 f32) since "), "{text}");
        assert!(text.contains("no recording of rank 1 of 2"), "{text}");
        assert!(text.contains("garbled") && text.contains("no regular file; left out"), "{text}");
        fs::remove_dir_all(folder).unwrap();
    }

    /// The number of ranks may change from one start to the next.
    #[test]
    fn what_a_run_of_more_ranks_has_left_is_not_taken_for_ranks_of_this_one() {
        let folder = folder("fewer");
        let paths: Vec<PathBuf> = (0..4).map(|rank| folder.join(format!("rank-{rank}"))).collect();
        let run = |world: u32, operations: u64| {
            for rank in 0..world {
                let mut recorder = Recorder::create(&paths[rank as usize], rank, world, "n1").unwrap();
                for sequence in 1..=operations {
                    recorder.enter(sequence, Op::AllGather, Tag::of("block", 0), 10);
                    recorder.leave();
                }
            }
        };
        run(4, 9);
        run(2, 3);
        let text = merge(&paths).unwrap();
        for rank in [2, 3] {
            assert!(text.contains(&format!("rank-{rank} is left out: another run, of 4 ranks and not 2\n")), "{text}");
        }
        assert!(text.ends_with("all left all_gather #3 of block 0: none waits for another\n"), "{text}");
        assert!(!text.contains("#9"), "{text}");
        fs::remove_dir_all(folder).unwrap();
    }

    /// A run of world size 4: what each rank did, as (sequence, op, block, still in it).
    fn flights(of: &[&[(u64, Op, u32, bool)]]) -> Vec<Flight> {
        let entry = |(sequence, op, index, inside): &(u64, Op, u32, bool)| Entry {
            sequence: *sequence,
            op: *op,
            what: "block".to_owned(),
            index: *index,
            count: 1000,
            dtype: F32,
            start: *sequence,
            end: (!inside).then_some(*sequence),
        };
        let flight = |(rank, entries): (u32, &&[(u64, Op, u32, bool)])| Flight {
            rank,
            world_size: of.len() as u32,
            host: format!("n{}", 1 + rank / 2),
            process: 100 + rank,
            made: 0,
            entries: entries.iter().map(entry).collect(),
        };
        (0..).zip(of).map(flight).collect()
    }

    /// What a person looks for in a run that hangs:
    /// <https://github.com/pytorch/pytorch/issues/152623> ("finished collective #182, but
    /// didn't join collective #183").
    #[test]
    fn who_never_came_is_named() {
        use Op::{AllGather, ReduceScatter};
        let said = |of: &[&[(u64, Op, u32, bool)]]| behind(&flights(of), &|ns| format!("T{ns}"));
        let waits: &[(u64, Op, u32, bool)] = &[(8811, AllGather, 16, false), (8812, AllGather, 17, true)];
        let left: &[(u64, Op, u32, bool)] = &[(8811, AllGather, 16, false)];
        let stuck: &[(u64, Op, u32, bool)] = &[(8811, AllGather, 16, true)];
        let done: &[(u64, Op, u32, bool)] = &[(8812, AllGather, 17, false)];
        assert_eq!(
            said(&[waits, waits, waits, left]),
            ["rank 3 on n2 never entered all_gather #8812 of block 17; ranks 0-2 on n1 n2 wait in it since T8812"]
        );
        assert_eq!(
            said(&[waits, waits, stuck, left]),
            [
                "rank 3 on n2 never entered all_gather #8812 of block 17; ranks 0-1 on n1 wait in it since T8812",
                "rank 2 on n2 is still in all_gather #8811 of block 16 since T8811; others are at all_gather #8812 of block 17"
            ]
        );
        assert_eq!(
            said(&[waits, done, &[], waits]),
            [
                "rank 2 on n2 never entered #1; others are at all_gather #8812 of block 17: ranks 0 3 on n1 n2 wait in it since T8812"
            ]
        );
        assert_eq!(
            said(&[waits, waits]),
            ["all are in all_gather #8812 of block 17 since T8812: what is missing is data, not a rank"]
        );
        assert_eq!(
            said(&[waits, done]),
            ["rank 0 on n1 is in all_gather #8812 of block 17 since T8812, which rank 1 on n1 left"]
        );
        assert_eq!(said(&[done, done]), ["all left all_gather #8812 of block 17: none waits for another"]);
        assert_eq!(said(&[&[], &[]]), ["no rank entered any operation"]);
        let other: &[(u64, Op, u32, bool)] = &[(8811, AllGather, 16, false), (8812, ReduceScatter, 16, true)];
        assert_eq!(
            differ(&flights(&[waits, waits, other, waits])).unwrap(),
            "ranks differ: ranks 0-1 3 on n1 n2 at all_gather #8812 of block 17 (1000 f32), rank 2 on n2 at \
             reduce_scatter #8812 of block 16 (1000 f32)"
        );
        assert_eq!(differ(&flights(&[waits, left, done])), None);
    }
}
