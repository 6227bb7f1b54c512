//! The mark that a warm-up leaves in a directory while it fills it, so that no other
//! does so too. Locks of files are not enough: on some file systems of clusters
//! everybody gets them (<https://github.com/huggingface/huggingface_hub/pull/4306>).
//!
//! The mark is a directory: of several that make it one does. Its holder writes a
//! counter there again and again. Who finds the mark waits, and takes it over when
//! the counter has stood still for long by the waiting one's own clock; clocks of
//! different nodes are never compared. Taking over is making the next directory in
//! it, `1`, `2` and so on; of several that make it one does, and nobody else's is
//! ever removed. A holder that gives its mark back makes that directory itself first,
//! so that nobody takes it over at that moment.

use std::io;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::config::printable;
use crate::plan::warmup::MARK as NAME;
use crate::system::folder::{Folder, Found, unforeseen_name};

const OWNER: &str = "owner";
const COUNTER: &str = "counter";

/// More than any owner's text.
const LONGEST: u64 = 4096;

/// More than anybody takes over.
const MOST: u32 = 1000;

/// How long the giving back of a mark may take before somebody may have taken it over.
const GIVE_BACK: Duration = Duration::from_secs(30);

/// Who holds a mark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// JOB.STEP.
    pub step: String,
    /// The node.
    pub host: String,
    /// The user's id.
    pub user: u32,
    /// The process.
    pub pid: u32,
    /// Of this warm-up alone.
    pub id: String,
}

/// A mark that somebody else has, as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    place: (u64, u64),
    generation: u32,
    owner: Vec<u8>,
    counter: Vec<u8>,
}

impl Seen {
    /// Whose it is, in words.
    pub fn holder(&self) -> String {
        match serde_json::from_slice::<Owner>(&self.owner) {
            Ok(owner) => format!(
                "step {} on {} (user {}, process {})",
                printable(&owner.step),
                printable(&owner.host),
                owner.user,
                owner.pid
            ),
            Err(_) => "a step that has not said which it is".into(),
        }
    }

    fn is_of(&self, id: &str) -> bool {
        serde_json::from_slice::<Owner>(&self.owner).is_ok_and(|owner| owner.id == id)
    }
}

/// A mark of ours.
#[derive(Debug)]
pub struct Marker {
    target: Folder,
    mark: Folder,
    own: Folder,
    generation: u32,
    count: u64,
}

/// What came of trying to set one.
#[derive(Debug)]
pub enum Tried {
    /// It is ours.
    Set(Marker),
    /// It was ours already, by another name of the directory.
    OursAlready,
    /// Somebody else's is there.
    Held(Seen),
    /// None can be set there.
    Impossible(io::Error),
}

/// Sets the mark in the directory `target`, which is made where it is missing, as the
/// command would make it.
pub fn set(target: &str, owner: &Owner) -> Tried {
    try_set(target, owner, None).unwrap_or_else(Tried::Impossible)
}

/// Takes over a mark that looks as `seen` still.
pub fn take_over(target: &str, owner: &Owner, seen: &Seen) -> Tried {
    try_set(target, owner, Some(seen)).unwrap_or_else(Tried::Impossible)
}

fn try_set(target: &str, owner: &Owner, silent: Option<&Seen>) -> io::Result<Tried> {
    let target = match Folder::at(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all(target)?;
            Folder::at(target)?
        }
        folder => folder?,
    };
    // As often as it is given back just when it is looked at.
    for _ in 0..20 {
        match target.make(NAME, 0o777) {
            Ok(()) => {
                let mark = inside(&target, NAME)?;
                let own = inside(&target, NAME)?;
                return Marker { target, mark, own, generation: 0, count: 0 }.signed(owner);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let looked = inside(&target, NAME).and_then(|mark| look(&mark).map(|seen| (mark, seen)));
        let (mark, seen) = match looked {
            Err(error) if gone(&error) => continue,
            looked => looked?,
        };
        if seen.is_of(&owner.id) {
            return Ok(Tried::OursAlready);
        }
        if silent != Some(&seen) {
            return Ok(Tried::Held(seen));
        }
        let next = seen.generation + 1;
        match mark.make(&next.to_string(), 0o777) {
            Ok(()) => {
                let own = inside(&mark, &next.to_string())?;
                return Marker { target, mark, own, generation: next, count: 0 }.signed(owner);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists || gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("it comes and goes"))
}

fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESTALE)
}

fn inside(folder: &Folder, name: &str) -> io::Result<Folder> {
    match folder.find(name)? {
        Found::Folder(found) => Ok(found),
        _ => Err(io::Error::other(format!("{name} is no directory"))),
    }
}

fn look(mark: &Folder) -> io::Result<Seen> {
    let mut generation = 0;
    let mut last = None;
    while generation < MOST {
        match inside(mark, &(generation + 1).to_string()) {
            Ok(folder) => last = Some(folder),
            // Not for us to read: then it is one that gives no sign.
            Err(error) if gone(&error) || error.kind() == io::ErrorKind::PermissionDenied => break,
            Err(error) => return Err(error),
        }
        generation += 1;
    }
    let folder = last.as_ref().unwrap_or(mark);
    // Not there yet, or not for us to read.
    let read = |name| folder.read(name, LONGEST).unwrap_or_default();
    Ok(Seen { place: mark.identity()?, generation, owner: read(OWNER), counter: read(COUNTER) })
}

/// As wide as any count, so that it is written in one piece over the last one.
fn counted(count: u64) -> String {
    format!("{count:020}\n")
}

impl Marker {
    /// Where nothing can be written the mark still counts, for as long as a silent one does.
    fn signed(self, owner: &Owner) -> io::Result<Tried> {
        let text = serde_json::to_string(owner).map_err(io::Error::other)?;
        let _ = self.own.write_text(OWNER, &text);
        let _ = self.own.write_text(COUNTER, &counted(0));
        Ok(Tried::Set(self))
    }

    /// Gives a sign of life. False: another has taken the mark over.
    pub fn beat(&mut self) -> bool {
        self.count += 1;
        let _ = self.own.write_over(COUNTER, &counted(self.count));
        let next = (self.generation + 1).to_string();
        !matches!(self.mark.find(&next), Ok(Found::Folder(_)))
    }

    /// Gives it back. Nothing of it is left.
    pub fn give_back(self) {
        let start = Instant::now();
        let last = self.generation + 1;
        if self.mark.make(&last.to_string(), 0o777).is_err() || start.elapsed() > GIVE_BACK {
            return; // it is another's now, or may be
        }
        let Ok(aside) = unforeseen_name() else { return };
        if self.target.rename(NAME, &aside).is_err() {
            return;
        }
        for generation in (1..=last).rev() {
            let name = generation.to_string();
            if let Ok(folder) = inside(&self.mark, &name) {
                let _ = folder.remove(OWNER);
                let _ = folder.remove(COUNTER);
            }
            let _ = self.mark.remove_folder(&name);
        }
        let _ = self.mark.remove(OWNER);
        let _ = self.mark.remove(COUNTER);
        let _ = self.target.remove_folder(&aside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    struct Place(PathBuf);

    impl Place {
        fn new() -> Place {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let name = format!("palingenesis-marker-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir(&path).unwrap();
            Place(path)
        }

        fn at(&self) -> &str {
            self.0.to_str().unwrap()
        }

        fn entries(&self) -> usize {
            std::fs::read_dir(&self.0).unwrap().count()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn owner(id: &str) -> Owner {
        Owner { step: "7.0".into(), host: "n1".into(), user: 1001, pid: 42, id: id.into() }
    }

    #[track_caller]
    fn ours(tried: Tried) -> Marker {
        let Tried::Set(marker) = tried else { panic!("{tried:?}") };
        marker
    }

    #[track_caller]
    fn others(tried: Tried) -> Seen {
        let Tried::Held(seen) = tried else { panic!("{tried:?}") };
        seen
    }

    #[test]
    fn one_has_it_and_gives_it_back_without_a_trace() {
        let place = Place::new();
        let mut marker = ours(set(place.at(), &owner("a")));
        let seen = others(set(place.at(), &owner("b")));
        assert_eq!(seen.holder(), "step 7.0 on n1 (user 1001, process 42)");
        assert!(matches!(set(place.at(), &owner("a")), Tried::OursAlready));
        assert!(marker.beat());
        assert_ne!(others(set(place.at(), &owner("b"))), seen);
        marker.give_back();
        assert_eq!(place.entries(), 0);
        ours(set(place.at(), &owner("b"))).give_back();
        assert_eq!(place.entries(), 0);
    }

    #[test]
    fn one_of_several_takes_it_over_and_its_former_holder_sees_it() {
        let place = Place::new();
        let mut killed = ours(set(place.at(), &owner("a")));
        let seen = others(set(place.at(), &owner("b")));
        let mut second = ours(take_over(place.at(), &owner("b"), &seen));
        // Who had seen the same finds another's.
        let seen = others(take_over(place.at(), &owner("c"), &seen));
        assert!(!killed.beat() && second.beat());
        // What the former holder does takes nothing away.
        killed.give_back();
        assert!(second.beat());
        assert_ne!(others(set(place.at(), &owner("c"))), seen);
        second.give_back();
        assert_eq!(place.entries(), 0);
    }

    /// Its holder went on while a waiting one decided.
    #[test]
    fn one_that_was_given_back_meanwhile_is_not_taken_over() {
        let place = Place::new();
        let first = ours(set(place.at(), &owner("a")));
        let seen = others(set(place.at(), &owner("b")));
        first.give_back();
        let second = ours(set(place.at(), &owner("c")));
        others(take_over(place.at(), &owner("b"), &seen));
        second.give_back();
        ours(take_over(place.at(), &owner("b"), &seen)).give_back();
        assert_eq!(place.entries(), 0);
    }

    /// In a cache of a group another member may have put a file of ours in its place.
    #[test]
    fn a_sign_of_life_is_written_to_no_file_from_elsewhere() {
        let place = Place::new();
        let mut marker = ours(set(place.at(), &owner("a")));
        let (counter, file) = (place.0.join(NAME).join(COUNTER), place.0.join("thesis"));
        std::fs::write(&file, "of years").unwrap();
        std::fs::remove_file(&counter).unwrap();
        std::fs::hard_link(&file, &counter).unwrap();
        assert!(marker.beat());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "of years");
        std::fs::remove_file(&counter).unwrap();
        std::os::unix::fs::symlink(&file, &counter).unwrap();
        assert!(marker.beat());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "of years");
    }

    #[test]
    fn a_holder_killed_before_it_signed_is_one_too() {
        let place = Place::new();
        std::fs::create_dir(place.0.join(NAME)).unwrap();
        let seen = others(set(place.at(), &owner("b")));
        assert_eq!(seen.holder(), "a step that has not said which it is");
        ours(take_over(place.at(), &owner("b"), &seen)).give_back();
        assert_eq!(place.entries(), 0);
    }

    #[test]
    fn what_is_no_mark_is_left_alone() {
        let place = Place::new();
        for what in ["file", "link"] {
            let path = place.0.join(NAME);
            match what {
                "file" => std::fs::write(&path, "").unwrap(),
                _ => std::os::unix::fs::symlink("/etc", &path).unwrap(),
            }
            assert!(matches!(set(place.at(), &owner("a")), Tried::Impossible(_)), "{what}");
            std::fs::remove_file(&path).unwrap();
        }
    }

    /// <https://github.com/astral-sh/uv/issues/17399>: of many, one at a time, while they
    /// set marks and give them back.
    #[test]
    fn never_two_at_a_time() {
        let place = Place::new();
        let inside = AtomicU32::new(0);
        let got = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for number in 0..8 {
                let (place, inside, got) = (&place, &inside, &got);
                scope.spawn(move || {
                    let owner = owner(&number.to_string());
                    let mut own = 0;
                    while own < 50 {
                        match set(place.at(), &owner) {
                            Tried::Set(mut marker) => {
                                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                                assert!(marker.beat());
                                inside.fetch_sub(1, Ordering::SeqCst);
                                marker.give_back();
                                got.fetch_add(1, Ordering::SeqCst);
                                own += 1;
                            }
                            Tried::Held(_) => std::thread::sleep(Duration::from_micros(50)),
                            other => panic!("{other:?}"),
                        }
                    }
                });
            }
        });
        assert_eq!(got.load(Ordering::SeqCst), 400);
        assert_eq!(place.entries(), 0);
    }
}
