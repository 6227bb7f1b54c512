//! Shows by a token whether directories are the same on all nodes: rank 0's node writes
//! one into each, every node looks for it, and tries to write itself, rank 0's node
//! removes it. As the user, each place in a forked child with a deadline: a dead file
//! server answers no call.
//!
//! A token is a file of a name that nobody can foresee, so that no node has looked for it
//! before and remembers that it is not there. It lies in a directory of its own in the
//! place, for the user alone: what a killed launch has left is found there without reading
//! the place's names, of which there may be millions. That directory is removed by whoever
//! finds it empty; launches that use a place at the same time make it again for each other.
//!
//! Removed is only what is certainly a token or a try that nobody needs any more:
//! `stale` says which.

use std::cell::Cell;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Work;
use crate::facts::directories::{
    self as facts, Fault, FileSystem, Missing, PATIENCE, Walked, What, failed, fault, walk,
};
use crate::facts::mounts;
use crate::plan::StepPlan;
use crate::plan::preflight::directories::{Absence, FOLDER, MOST, Place, Seen, Sight, Token};
use crate::system::child::{Asked, ask};
use crate::system::folder::{Entry, Folder, Found, unforeseen_name, user};
use crate::system::random;

/// How long a token is waited for. The names in a directory and the attributes of files
/// that an NFS client knows of may be 3 to 60 s old by default (nfs(5), `acregmin`,
/// `acdirmax`), but each attempt makes it ask the server ([`Folder::refresh`]).
const SOON: Duration = Duration::from_secs(15);

/// The same on a file system of the node, which has nobody to ask.
const AT_ONCE: Duration = Duration::from_secs(3);

/// From one attempt to the next, growing.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How long removing may take.
const REMOVING: Duration = Duration::from_secs(5);

/// Begins each file that is made here.
const MAGIC: &str = "palingenesis pre-flight 1\n";

/// The longest token.
const TOKEN_MAX: usize = 512;

/// What each node writes: more than file systems keep beside a file's name, so that it
/// takes a block and a quota.
const TRY: usize = 64 * 1024;

/// Nobody looks for a file of ours as old as this, in seconds: no look takes an hour.
const OLD: i64 = 2 * 3600;

/// Files of killed launches that are looked at, and for how long.
const MOST_STALE: usize = 4096;
const SWEEPING: Duration = Duration::from_secs(2);

/// Attempts to make a file in a directory that others remove whenever it is empty.
const ATTEMPTS: u32 = 200;

/// Rights of an output directory that is made, less the umask.
const OUTPUT_MODE: u32 = 0o755;

/// Rights of ours.
const PRIVATE: u32 = 0o700;

/// Of another node's words the rest is left out.
const LONGEST: usize = 1024;

/// The longest answers, in bytes of JSON.
pub const ANSWER_MAX: usize = 256 * 1024;

/// Who writes.
#[derive(Debug, Clone)]
struct Who {
    step: String,
    node: String,
    serves: bool,
}

impl Who {
    fn of(step: &StepPlan) -> Who {
        let name = |text: &str| text.chars().filter(|c| !c.is_control()).take(64).collect();
        Who { step: format!("{}.{}", step.job_id, step.step_id), node: name(&step.node), serves: step.node_rank == 0 }
    }

    /// What a file begins with. At most some 250 bytes.
    fn content(&self) -> io::Result<String> {
        let random: String = random::bytes::<32>()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let Who { step, node, .. } = self;
        Ok(format!("{MAGIC}uid {}\nstep {step}\nnode {node}\ntime {time}\nrandom {random}\n", user()))
    }
}

/// Rank 0's node: leaves tokens. Answer: [`tokens`] reads it.
pub fn writing(places: Vec<Place>, step: &StepPlan) -> impl Work + use<> {
    let who = Who::of(step);
    let tries = places.into_iter().take(MOST).map(|place| {
        let none = no_token(&place);
        Try::start(none, PATIENCE, || leave(&place, &who))
    });
    Tries(tries.collect())
}

/// Every node: looks for them. `places` are this node's own; nothing else is opened,
/// whatever the tokens say. Answer: [`seen`] reads it.
pub fn looking(places: Vec<Place>, tokens: Vec<Token>, step: &StepPlan) -> impl Work + use<> {
    let who = Who::of(step);
    let tries = tokens.into_iter().take(MOST).map(|token| {
        let own = places.iter().find(|place| place.what == token.what);
        let silent = token.fault.clone().filter(|fault| who.serves && matches!(fault.what, What::Silent(_)));
        if silent.is_some() {
            return Try::answered(Seen { fault: silent, ..Seen::new(&token.what, &token.path, Sight::NoToken) });
        }
        if !is_token(&token) {
            let mut unseen = Seen::new(&token.what, own.map_or("", |own| own.path.as_str()), Sight::NoToken);
            unseen.fail(What::Failed(NO_TOKEN.into()));
            return Try::answered(unseen);
        }
        match own.filter(|own| own.path == token.path) {
            Some(place) => {
                let unseen = Seen::new(&place.what, &place.path, Sight::NoToken);
                Try::start(unseen, SOON + PATIENCE, || look(place, &token, &who))
            }
            None => {
                let path = own.map_or("", |own| own.path.as_str());
                Try::answered(Seen::new(&token.what, path, Sight::Elsewhere))
            }
        }
    });
    Tries(tries.collect())
}

/// Reads what [`writing`] answered, on any node.
///
/// # Errors
/// What is wrong with it.
pub fn tokens(bytes: &[u8]) -> Result<Vec<Token>, String> {
    let mut tokens: Vec<Token> = read(bytes)?;
    for token in &mut tokens {
        if !is_token(token) {
            return Err(NO_TOKEN.into());
        }
        cut(&mut token.what);
        cut(&mut token.path);
        token.fault.iter_mut().for_each(cut_fault);
    }
    Ok(tokens)
}

/// Reads what [`looking`] answered on another node.
///
/// # Errors
/// What is wrong with it.
pub fn seen(bytes: &[u8]) -> Result<Vec<Seen>, String> {
    let mut seen: Vec<Seen> = read(bytes)?;
    for seen in &mut seen {
        cut(&mut seen.what);
        cut(&mut seen.path);
        seen.fault.iter_mut().chain(&mut seen.write).for_each(cut_fault);
        if let Some(mount) = &mut seen.mount {
            [&mut mount.at, &mut mount.kind, &mut mount.source].into_iter().for_each(cut);
        }
    }
    Ok(seen)
}

const NO_TOKEN: &str = "a token of a form that none has";

/// Whether its name is none of another directory, and its content not long.
fn is_token(token: &Token) -> bool {
    token.content.len() <= TOKEN_MAX && token.name.as_ref().is_none_or(|name| is_name(name))
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<Vec<T>, String> {
    if bytes.len() > ANSWER_MAX {
        return Err(format!("an answer of {} bytes", bytes.len()));
    }
    let list: Vec<T> = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if list.len() > MOST { Err(format!("{} directories", list.len())) } else { Ok(list) }
}

fn cut(text: &mut String) {
    if let Some((end, _)) = text.char_indices().nth(LONGEST) {
        text.truncate(end);
    }
}

fn cut_fault(fault: &mut Fault) {
    cut(&mut fault.at);
    if let What::Silent(why) | What::Failed(why) = &mut fault.what {
        cut(why);
    }
}

/// Rank 0's node: removes its tokens; where the step does not start, also the directory
/// that was made for one, if nothing is in it. Waits a few seconds at the most.
pub fn clean(places: &[Place], tokens: &[Token], starts: bool) {
    let own = |token: &Token| places.iter().find(|place| place.what == token.what && place.path == token.path);
    let children: Vec<Asked> = tokens
        .iter()
        .filter_map(|token| Some((own(token)?, token)))
        .filter_map(|(place, token)| {
            let remove = || {
                remove(place, token, starts);
                Vec::new()
            };
            ask(remove).ok()
        })
        .collect();
    for child in children {
        let _ = child.answer(REMOVING);
    }
}

/// What a child is asked, by what is known without it.
trait Told: Serialize + DeserializeOwned {
    /// No answer came.
    fn fail(&mut self, what: What);
}

impl Told for Token {
    fn fail(&mut self, what: What) {
        self.fault = Some(fault(&self.path, what));
    }
}

impl Told for Seen {
    fn fail(&mut self, what: What) {
        self.fault = Some(fault(&self.path, what));
    }
}

/// One place, in a child.
struct Try<T> {
    asked: Option<Asked>,
    limit: Duration,
    /// The answer; until there is one, what is known without it.
    answer: T,
}

impl<T: Told> Try<T> {
    fn answered(answer: T) -> Try<T> {
        Try { asked: None, limit: Duration::ZERO, answer }
    }

    fn start(known: T, limit: Duration, work: impl FnOnce() -> T) -> Try<T> {
        let mut made = Try { asked: None, limit, answer: known };
        match ask(|| serde_json::to_vec(&work()).unwrap_or_default()) {
            Ok(asked) => made.asked = Some(asked),
            Err(error) => made.answer.fail(What::Failed(error.to_string())),
        }
        made
    }

    /// Whether the answer is there.
    fn advance(&mut self) -> bool {
        let Some(asked) = &mut self.asked else { return true };
        let Some(answer) = asked.look(self.limit) else { return false };
        let answer = answer.map_err(|error| error.to_string());
        match answer.and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string())) {
            Ok(answer) => self.answer = answer,
            Err(why) => self.answer.fail(What::Silent(why)),
        }
        self.asked = None;
        true
    }
}

/// All places.
struct Tries<T>(Vec<Try<T>>);

impl<T: Told> Work for Tries<T> {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.iter().find_map(|one| one.asked.as_ref()).map(Asked::fd)
    }

    fn advance(&mut self) -> Option<Vec<u8>> {
        let mut answered = true;
        for one in &mut self.0 {
            answered &= one.advance();
        }
        answered.then(|| {
            let answers: Vec<&T> = self.0.iter().map(|one| &one.answer).collect();
            serde_json::to_vec(&answers).unwrap_or_default()
        })
    }
}

fn no_token(place: &Place) -> Token {
    Token {
        what: place.what.clone(),
        path: place.path.clone(),
        owner: user(),
        name: None,
        content: String::new(),
        made: false,
        fault: None,
    }
}

/// Leaves a token in a place.
fn leave(place: &Place, who: &Who) -> Token {
    let mut token = no_token(place);
    let mut attempt = || try_leave(place, who, &mut token).err();
    let outcome = match attempt() {
        // Another launch, which did not start, may have removed what it had made.
        Some(Fault { what: What::Missing, at }) if at.ends_with(&folder_of(user())) => attempt(),
        outcome => outcome,
    };
    token.fault = outcome;
    token
}

fn try_leave(place: &Place, who: &Who, token: &mut Token) -> Result<(), Fault> {
    let folder = reach(place, Some(&mut token.made))?;
    token.content = who.content().map_err(|error| failed(&folder.at, &error, &folder.folder))?;
    match make_file(&folder, token.content.as_bytes()) {
        Ok((own, name, entry)) => {
            token.name = Some(name);
            sweep(&own, entry.written);
            Ok(())
        }
        Err(fault) => {
            tidy(&folder, user());
            Err(fault)
        }
    }
}

/// The place's directory. Where that is not there: with `made` it is made, if only its last
/// part lacks, and `made` says so; or the nearest above it is taken; or it is an error.
fn reach(place: &Place, made: Option<&mut bool>) -> Result<Walked, Fault> {
    let absent = Cell::new(None);
    let leave: Missing = &|_, _, at| {
        absent.set(Some(fault(at, What::Missing)));
        Ok(false)
    };
    let walked = match made.filter(|_| place.absence == Absence::Make) {
        None => walk(facts::root()?, &place.path, leave)?,
        Some(made) => {
            let (above, last) = place.path.rsplit_once('/').unwrap_or_default();
            let above = walk(facts::root()?, above, leave)?;
            let (tried, did) = (Cell::new(false), Cell::new(false));
            let make: Missing = &|folder, name, at| {
                // Once: the target of a link may lack more.
                if tried.replace(true) {
                    return leave(folder, name, at);
                }
                match folder.make(name, OUTPUT_MODE) {
                    // Another launch was quicker.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(true),
                    Err(error) => Err(failed(at, &error, folder)),
                    Ok(()) => {
                        did.set(true);
                        Ok(true)
                    }
                }
            };
            let walked = if above.complete { walk(above, last, make)? } else { above };
            *made = did.get();
            walked
        }
    };
    if walked.complete || (place.absence == Absence::Above && !walked.at.is_empty()) {
        return Ok(walked);
    }
    Err(absent.take().unwrap_or_else(|| fault(&place.path, What::Missing)))
}

/// The name of the directory in which tokens of a user lie.
fn folder_of(owner: u32) -> String {
    format!("{FOLDER}{owner}")
}

/// Makes a file in this user's directory in a place, which is made with it.
fn make_file(place: &Walked, content: &[u8]) -> Result<(Folder, String, Entry), Fault> {
    let own = folder_of(user());
    let at = format!("{}/{own}", place.at);
    let wrong = |error: &io::Error| failed(&at, error, &place.folder);
    let name = unforeseen_name().map_err(|error| wrong(&error))?;
    let mut attempt = 0;
    loop {
        attempt += 1;
        let made = open_or_make(place, &own, &at).and_then(|folder| match folder.write_new(&name, content) {
            Ok(entry) => Ok((folder, entry)),
            Err(error) if is_gone(&error) => Err(None),
            Err(error) => Err(Some(failed(&at, &error, &folder))),
        });
        match made {
            Ok((folder, entry)) => {
                // A file of ours in a stranger's directory has another owner than that. (By
                // the numbers in it: a server may show us under another than ours.)
                let owner = folder.status().map_err(|error| wrong(&error))?.owner;
                if owner != entry.owner {
                    let _ = folder.remove(&name);
                    return Err(fault(&at, What::Foreign(owner)));
                }
                return Ok((folder, name, entry));
            }
            Err(Some(fault)) => return Err(fault),
            // Another launch was the last in it and has removed it.
            Err(None) if attempt < ATTEMPTS => std::thread::sleep(Duration::from_millis(u64::from(attempt % 7))),
            Err(None) => return Err(fault(&at, What::Missing)),
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE))
}

/// The directory of that name. `None` for an error: it is gone again.
fn open_or_make(place: &Walked, name: &str, at: &str) -> Result<Folder, Option<Fault>> {
    let find = || match place.folder.find(name) {
        Ok(Found::Folder(folder)) => Ok(Some(folder)),
        Ok(Found::Link { .. }) => Err(Some(fault(at, What::Link))),
        Ok(Found::Other) => Err(Some(fault(at, What::NotDirectory))),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(Some(failed(at, &error, &place.folder))),
    };
    if let Some(folder) = find()? {
        return Ok(folder);
    }
    match place.folder.make(name, PRIVATE) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists && !is_gone(&error) => {
            Err(Some(failed(&place.at, &error, &place.folder)))
        }
        _ => find()?.ok_or(None),
    }
}

/// Whether a file's name is one of ours: [`unforeseen_name`]'s.
fn is_name(name: &str) -> bool {
    let digits = name.strip_prefix(".palingenesis-").unwrap_or_default();
    digits.len() == 24 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Removes what killed launches have left. `now` is the time by the clock of whoever keeps
/// the files: nodes' clocks may be wrong.
fn sweep(folder: &Folder, now: i64) {
    let end = Instant::now() + SWEEPING;
    let Ok(owner) = folder.status().map(|status| status.owner) else { return };
    for name in folder.names(MOST_STALE).unwrap_or_default() {
        if Instant::now() >= end {
            return;
        }
        if stale(folder, &name, owner, now) {
            let _ = folder.remove(&name);
        }
    }
}

/// Whether a file is of this program and this user, and was left: its name is of our form,
/// it is a regular file without a second name, of the owner of our directory, two hours
/// old, and begins as ours do. An empty one was left between two calls.
fn stale(folder: &Folder, name: &str, owner: u32, now: i64) -> bool {
    let ours = |entry: &Entry| {
        entry.regular
            && entry.alone
            && entry.owner == owner
            && entry.size <= TRY as u64
            && now.saturating_sub(entry.written) > OLD
    };
    if !is_name(name) || !folder.entry(name).is_ok_and(|entry| ours(&entry)) {
        return false;
    }
    let Ok((entry, content)) = folder.read_file(name, TOKEN_MAX as u64) else { return false };
    let start = format!("{MAGIC}uid {}\n", user());
    ours(&entry) && (content.is_empty() || content.starts_with(start.as_bytes()))
}

/// Looks for a token, and tries to write.
fn look(place: &Place, token: &Token, who: &Who) -> Seen {
    let start = Instant::now();
    let mut seen = Seen::new(&place.what, &place.path, Sight::NoToken);
    let mut pause = PAUSE;
    let reached = loop {
        let reached = reach(place, None);
        if let Ok(walked) = &reached {
            walked.folder.refresh();
        }
        let Some(name) = &token.name else { break reached };
        seen.sight = Sight::Absent;
        if reached.as_ref().is_ok_and(|walked| is_there(walked, token, name)) {
            seen.sight = Sight::Same(start.elapsed().as_millis().try_into().unwrap_or(u64::MAX));
            break reached;
        }
        // What will not come.
        let hopeless = matches!(&reached, Err(Fault { what: What::Denied | What::Foreign(_), .. }));
        if hopeless || start.elapsed() + pause > patience(place, &reached) {
            break reached;
        }
        std::thread::sleep(pause);
        pause = (pause * 3 / 2).min(LONGEST_PAUSE);
    };
    let walked = match reached {
        Ok(walked) => walked,
        Err(fault) => {
            // Where it would be.
            let above = Place { absence: Absence::Above, ..place.clone() };
            seen.mount = reach(&above, None).ok().and_then(|above| mount(&above));
            // Rank 0's node knows better: it has tried to make it.
            seen.fault = token.fault.clone().filter(|_| who.serves && token.name.is_none()).or(Some(fault));
            return seen;
        }
    };
    seen.mount = mount(&walked);
    if walked.complete {
        seen.inode = walked.folder.status().ok().map(|status| status.inode);
    }
    if place.write {
        seen.write = try_to_write(&walked, who, matches!(seen.sight, Sight::Same(_))).err();
    }
    if let Ok(room) = walked.folder.room() {
        seen.space = (room.size > 0).then_some((room.free, room.size));
        seen.files = (room.files.1 > 0).then_some(room.files);
    }
    seen
}

fn mount(walked: &Walked) -> Option<mounts::Mount> {
    let path = if walked.at.is_empty() { "/" } else { &walked.at };
    mounts::of(Path::new("/"), walked.folder.number(), path)
}

/// How long a token may take to be seen.
fn patience(place: &Place, reached: &Result<Walked, Fault>) -> Duration {
    let kind = |walked: &Walked| walked.folder.room().ok().map(|room| FileSystem::of(room.kind));
    let found = match reached {
        Ok(walked) => kind(walked),
        Err(_) => facts::nearest(&place.path).and_then(|walked| kind(&walked)),
    };
    match found.map(|found| found.place) {
        Some(facts::Place::Node) => AT_ONCE,
        _ => SOON,
    }
}

fn is_there(walked: &Walked, token: &Token, name: &str) -> bool {
    let Ok(Found::Folder(folder)) = walked.folder.find(&folder_of(token.owner)) else { return false };
    folder.refresh();
    folder.read_file(name, TOKEN_MAX as u64 + 1).is_ok_and(|(_, content)| content == token.content.as_bytes())
}

/// Writes a file as long as [`TRY`] and removes it. Where the token is not, nobody else
/// removes what was left.
fn try_to_write(walked: &Walked, who: &Who, shared: bool) -> Result<(), Fault> {
    let wrong = |error: io::Error| failed(&walked.at, &error, &walked.folder);
    // Of our directory in it, which is there already, a file would not say.
    walked.folder.may_write().map_err(wrong)?;
    let mut content = who.content().map_err(wrong)?.into_bytes();
    // No file system makes it shorter, or keeps it once for all nodes.
    let seed = random::bytes::<8>().map_err(wrong)?;
    let mut word = u64::from_ne_bytes(seed) | 1;
    while content.len() < TRY {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        content.extend(word.to_ne_bytes());
    }
    content.truncate(TRY);
    let (folder, name, entry) = make_file(walked, &content).inspect_err(|_| tidy(walked, user()))?;
    if !shared {
        sweep(&folder, entry.written);
    }
    let _ = folder.remove(&name);
    tidy(walked, entry.owner);
    Ok(())
}

/// Removes our directory in a place if nothing is in it. `owner`: whom files of ours
/// belong to there.
fn tidy(place: &Walked, owner: u32) {
    let name = folder_of(user());
    if let Ok(Found::Folder(folder)) = place.folder.find(&name)
        && folder.status().is_ok_and(|status| status.owner == owner)
    {
        let _ = place.folder.remove_folder(&name);
    }
}

/// Removes a token and what was made for it.
fn remove(place: &Place, token: &Token, starts: bool) {
    let Ok(walked) = reach(place, None) else { return };
    let mut owner = user();
    if let Ok(Found::Folder(folder)) = walked.folder.find(&folder_of(user()))
        && let Some(name) = &token.name
        && let Ok((entry, content)) = folder.read_file(name, TOKEN_MAX as u64 + 1)
        && content == token.content.as_bytes()
    {
        owner = entry.owner;
        let _ = folder.remove(name);
    }
    tidy(&walked, owner);
    if !token.made || starts {
        return;
    }
    // By its path without links: it was made there.
    if let Some((above, last)) = walked.at.rsplit_once('/')
        && let Some(above) = facts::nearest(above).filter(|above| above.complete)
    {
        let _ = above.folder.remove_folder(last);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    /// A directory for one test.
    struct World(PathBuf);

    impl World {
        fn new(name: &str) -> World {
            let path = std::env::temp_dir().join(format!("palingenesis-shared-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            // Its path without links, so that names compare.
            World(fs::canonicalize(path).unwrap())
        }

        fn place(&self, below: &str, absence: Absence) -> Place {
            let path = self.0.join(below).to_str().unwrap().trim_end_matches('/').to_string();
            Place { what: "output".into(), path, absence, write: true }
        }

        fn own(&self) -> PathBuf {
            self.0.join(folder_of(user()))
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for World {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn who(serves: bool) -> Who {
        Who { step: "7.0".into(), node: "n1".into(), serves }
    }

    fn wait(mut work: impl Work) -> Vec<u8> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(answer) = work.advance() {
                return answer;
            }
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn step() -> StepPlan {
        let world = crate::plan::tests::World::new("n[1-2]", "1(x2)", 0);
        world.plan("").unwrap().step
    }

    #[test]
    fn a_token_is_written_seen_and_removed_and_nothing_is_left() {
        let world = World::new("whole");
        let places = vec![world.place("", Absence::Make), world.place("out", Absence::Make)];
        let places: Vec<Place> =
            places.into_iter().zip(["a", "b"]).map(|(place, what)| Place { what: what.into(), ..place }).collect();
        let tokens = tokens(&wait(writing(places.clone(), &step()))).unwrap();
        assert_eq!(tokens.iter().map(|token| token.made).collect::<Vec<_>>(), [false, true]);
        let file = world.own().join(tokens[0].name.as_ref().unwrap());
        let data = fs::metadata(&file).unwrap();
        assert_eq!(data.permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(world.own()).unwrap().permissions().mode() & 0o777, 0o700);
        let seen = seen(&wait(looking(places.clone(), tokens.clone(), &step()))).unwrap();
        for seen in &seen {
            assert!(matches!(seen.sight, Sight::Same(millis) if millis < 2000), "{seen:?}");
            assert_eq!((&seen.fault, &seen.write), (&None, &None));
            assert!(seen.mount.is_some() && seen.space.is_some());
        }
        clean(&places, &tokens, true);
        assert_eq!(world.names(), ["out"]);
        assert!(fs::read_dir(world.0.join("out")).unwrap().next().is_none());
        // Where the step does not start the directory that was made for it goes, too.
        clean(&places, &tokens, false);
        assert!(world.names().is_empty());
    }

    #[test]
    fn a_directory_with_something_in_it_stays_whatever_becomes_of_the_step() {
        let world = World::new("full");
        let places = [world.place("out", Absence::Make)];
        let token = leave(&places[0], &who(true));
        fs::write(world.0.join("out/checkpoint"), "").unwrap();
        clean(&places, &[token], false);
        assert_eq!(fs::read_dir(world.0.join("out")).unwrap().count(), 1);
    }

    /// <https://github.com/pytorch/pytorch/pull/92553>: the parent must be there.
    #[test]
    fn only_the_last_part_of_a_path_is_made() {
        let world = World::new("parent");
        let missing = |below: &str| match leave(&world.place(below, Absence::Make), &who(true)).fault {
            Some(Fault { at, what: What::Missing }) => at.strip_prefix(world.0.to_str().unwrap()).unwrap().to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(missing("run/out"), "/run");
        symlink("far/away", world.0.join("link")).unwrap();
        // What a link leads to counts as one part, too.
        assert_eq!(missing("link"), "/far/away");
        fs::remove_dir(world.0.join("far")).unwrap();
        symlink("near", world.0.join("link2")).unwrap();
        assert_eq!(leave(&world.place("link2", Absence::Make), &who(true)).fault, None);
        assert!(world.0.join("near").is_dir());
        // A cache is never made.
        let cache = leave(&world.place("a/b", Absence::Above), &who(true));
        assert!(cache.fault.is_none() && !world.0.join("a").exists());
        let there = look(&world.place("a/b", Absence::Above), &cache, &who(false));
        assert!(matches!(there.sight, Sight::Same(_)));
        let none = leave(&world.place("a/b", Absence::Leave), &who(true));
        assert!(matches!(none.fault, Some(Fault { what: What::Missing, .. })));
    }

    /// A node opens no path but its own, whatever another says.
    #[test]
    fn a_token_for_a_path_that_this_node_does_not_have_opens_nothing() {
        let world = World::new("elsewhere");
        let places = vec![world.place("", Absence::Make)];
        let mut token = leave(&places[0], &who(true));
        token.path = "/etc".into();
        let other = Token { what: "cache".into(), ..token.clone() };
        let seen = seen(&wait(looking(places.clone(), vec![token, other], &step()))).unwrap();
        assert!(seen.iter().all(|seen| seen.sight == Sight::Elsewhere && seen.mount.is_none()), "{seen:?}");
        assert_eq!([seen[0].path.as_str(), seen[1].path.as_str()], [places[0].path.as_str(), ""]);
    }

    #[test]
    fn what_another_node_says_is_bounded() {
        let token = Token {
            name: Some(".palingenesis-0123456789abcdef01234567".into()),
            ..no_token(&World::new("wire").place("", Absence::Make))
        };
        let bytes = |token: &Token| serde_json::to_vec(&vec![token.clone()]).unwrap();
        assert!(tokens(&bytes(&token)).is_ok());
        for name in [
            "../../etc/passwd",
            "a/b",
            "",
            ".palingenesis-0123456789abcdef0123456/",
            ".palingenesis-0123456789ABCDEF01234567",
        ] {
            assert!(tokens(&bytes(&Token { name: Some(name.into()), ..token.clone() })).is_err(), "{name}");
        }
        // However they have come.
        let place = Place { what: token.what.clone(), path: "/tmp".into(), absence: Absence::Leave, write: false };
        let token_of = |name: &str| Token { name: Some(name.into()), path: "/tmp".into(), ..token.clone() };
        for name in ["../etc/passwd", ".."] {
            let seen = super::seen(&wait(looking(vec![place.clone()], vec![token_of(name)], &step()))).unwrap();
            assert!(
                matches!(&seen[0].fault, Some(Fault { what: What::Failed(why), .. }) if why == NO_TOKEN),
                "{seen:?}"
            );
        }
        let long = Token { content: "x".repeat(TOKEN_MAX + 1), ..token.clone() };
        assert!(tokens(&bytes(&long)).is_err());
        let many = vec![token.clone(); MOST + 1];
        assert!(tokens(&serde_json::to_vec(&many).unwrap()).is_err());
        assert!(tokens(&vec![b' '; ANSWER_MAX + 1]).is_err());
        for garbage in ["", "{}", "[{}]", "[1]", "\u{0}", "[[[["] {
            assert!(tokens(garbage.as_bytes()).is_err() && super::seen(garbage.as_bytes()).is_err(), "{garbage}");
        }
        let wordy = What::Failed("ä".repeat(100_000));
        let mut other = Seen::new(&"w".repeat(5000), "/", Sight::Absent);
        other.fault = Some(fault("/", wordy));
        let read = super::seen(&serde_json::to_vec(&vec![other]).unwrap()).unwrap();
        assert_eq!(read[0].what.len(), LONGEST);
        assert!(
            matches!(&read[0].fault, Some(Fault { what: What::Failed(why), .. }) if why.chars().count() == LONGEST)
        );
    }

    /// As an NFS client that has the directory's names from before.
    #[test]
    fn a_token_that_is_seen_late_is_the_same_directory() {
        let world = World::new("late");
        let place = world.place("", Absence::Make);
        let token = leave(&place, &who(true));
        let (there, hidden) = (world.own().join(token.name.as_ref().unwrap()), world.0.join("hidden"));
        fs::rename(&there, &hidden).unwrap();
        let seen = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(1));
                fs::rename(&hidden, &there).unwrap();
            });
            look(&place, &token, &who(false))
        });
        // Until AT_ONCE, if the file system of the machine's /tmp is one of the node.
        assert!(matches!(seen.sight, Sight::Same(millis) if millis >= 900), "{seen:?}");
    }

    #[test]
    fn a_token_with_another_content_is_another_directory() {
        let world = World::new("content");
        let place = world.place("", Absence::Make);
        let token = leave(&place, &who(true));
        let file = fs::OpenOptions::new().write(true).open(world.own().join(token.name.as_ref().unwrap())).unwrap();
        file.write_all_at(b"X", 60).unwrap();
        assert_eq!(look(&place, &token, &who(false)).sight, Sight::Absent);
    }

    /// Both removals of the directory and its making are in each other's way.
    #[test]
    fn launches_at_the_same_time_do_not_disturb_each_other() {
        let world = World::new("many");
        let place = world.place("out", Absence::Make);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let token = leave(&place, &who(true));
                        assert_eq!(token.fault, None);
                        let seen = look(&place, &token, &who(false));
                        assert!(matches!(seen.sight, Sight::Same(_)), "{seen:?}");
                        assert_eq!(seen.write, None);
                        remove(&place, &token, true);
                    }
                });
            }
        });
        assert!(fs::read_dir(world.0.join("out")).unwrap().next().is_none());
    }

    /// Sets a file's time of writing by so many hours back.
    fn age(file: &std::path::Path, hours: u32) {
        let done = Command::new("touch").arg("-h").args(["-d", &format!("{hours} hours ago")]).arg(file).status();
        assert!(done.unwrap().success());
    }

    fn name(number: usize) -> String {
        format!(".palingenesis-{number:024x}")
    }

    #[test]
    fn what_a_killed_launch_has_left_is_removed_and_nothing_else() {
        let world = World::new("stale");
        let place = world.place("", Absence::Make);
        fs::create_dir(world.own()).unwrap();
        fs::set_permissions(world.own(), fs::Permissions::from_mode(0o700)).unwrap();
        let ours = format!("{MAGIC}uid {}\nstep 1.0\n", user());
        let at = |number: usize| world.own().join(name(number));
        let old = |number: usize, content: &[u8]| {
            fs::write(at(number), content).unwrap();
            age(&at(number), 3);
        };
        // A token, a try, and two that were killed while they wrote.
        old(0, ours.as_bytes());
        old(1, &[ours.as_bytes(), &vec![b'x'; TRY - ours.len()]].concat());
        old(2, b"");
        old(3, format!("{MAGIC}uid {}\n", user()).as_bytes());
        let gone = 4;
        // Young; another's; another user's by its content; too long; two names; not ours by name.
        fs::write(at(10), &ours).unwrap();
        old(11, b"my thesis");
        old(12, format!("{MAGIC}uid {}\n", user() + 1).as_bytes());
        old(13, &[ours.as_bytes(), &vec![b'x'; TRY]].concat());
        old(14, ours.as_bytes());
        fs::hard_link(at(14), world.0.join("second")).unwrap();
        for other in ["thesis.tex", ".palingenesis-", ".palingenesis-0123", ".palingenesis-0123456789abcdef0123456g"] {
            fs::write(world.own().join(other), &ours).unwrap();
            age(&world.own().join(other), 3);
        }
        // What must not be opened, or not be followed.
        let fifo = at(20);
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        age(&fifo, 3);
        fs::write(world.0.join("target"), &ours).unwrap();
        age(&world.0.join("target"), 3);
        symlink("../target", at(21)).unwrap();
        age(&at(21), 3);
        fs::create_dir(at(22)).unwrap();
        let huge = fs::File::create(at(23)).unwrap();
        huge.set_len(1 << 40).unwrap();
        age(&at(23), 3);
        let before = fs::read_dir(world.own()).unwrap().count();
        let token = leave(&place, &who(true));
        assert_eq!(token.fault, None);
        assert_eq!(fs::read_dir(world.own()).unwrap().count(), before - gone + 1);
        assert!((0..gone).all(|number| fs::symlink_metadata(at(number)).is_err()));
        remove(&place, &token, false);
        assert_eq!(fs::read_dir(world.own()).unwrap().count(), before - gone);
        assert!(world.0.join("target").exists());
    }

    /// By the clock of whoever keeps the files: the new file's time, not the node's.
    #[test]
    fn the_age_of_a_file_is_by_the_file_server_s_clock() {
        let world = World::new("clock");
        let file = world.0.join(name(1));
        fs::write(&file, format!("{MAGIC}uid {}\n", user())).unwrap();
        let folder = facts::nearest(world.0.to_str().unwrap()).unwrap().folder;
        let data = fs::metadata(&file).unwrap();
        let stale = |now: i64| stale(&folder, &name(1), data.uid(), now);
        assert!(!stale(data.mtime()) && !stale(data.mtime() + OLD) && !stale(i64::MIN));
        assert!(stale(data.mtime() + OLD + 1) && stale(i64::MAX));
        assert!(!super::stale(&folder, &name(1), data.uid() + 1, i64::MAX));
    }

    #[test]
    fn a_name_that_another_holds_is_not_used() {
        let world = World::new("held");
        let place = world.place("", Absence::Make);
        let held = |what: What| {
            let token = leave(&place, &who(true));
            assert_eq!(token.fault, Some(Fault { at: world.own().to_str().unwrap().into(), what }));
            assert_eq!(token.name, None);
        };
        fs::create_dir(world.0.join("trap")).unwrap();
        symlink("trap", world.own()).unwrap();
        held(What::Link);
        assert!(fs::read_dir(world.0.join("trap")).unwrap().next().is_none());
        fs::remove_file(world.own()).unwrap();
        fs::write(world.own(), "").unwrap();
        held(What::NotDirectory);
        fs::remove_file(world.own()).unwrap();
        assert!(Command::new("mkfifo").arg(world.own()).status().unwrap().success());
        held(What::NotDirectory);
        if user() == 0 {
            fs::remove_file(world.own()).unwrap();
            fs::create_dir(world.own()).unwrap();
            std::os::unix::fs::chown(world.own(), Some(12345), None).unwrap();
            held(What::Foreign(12345));
            assert!(fs::read_dir(world.own()).unwrap().next().is_none());
        } else {
            println!("skipped in part: needs root, for another user's directory");
        }
    }

    /// As on a dead server: the place is a child's that never answers.
    #[test]
    fn a_place_that_does_not_answer_hides_no_other() {
        let known = |what: &str| Seen::new(what, "/dead", Sight::NoToken);
        let dead = Try::start(known("dead"), Duration::from_millis(300), || {
            loop {
                std::thread::sleep(Duration::from_secs(60));
            }
        });
        let live = Try::start(known("live"), Duration::from_secs(20), || Seen { inode: Some(5), ..known("live") });
        let start = Instant::now();
        let seen = seen(&wait(Tries(vec![dead, live]))).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
        assert!(matches!(&seen[0].fault, Some(Fault { what: What::Silent(_), at }) if at == "/dead"), "{seen:?}");
        assert_eq!((&seen[1].fault, seen[1].inode), (&None, Some(5)));
    }
}
