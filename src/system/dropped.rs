//! A forked child that gives up root for good before it does anything: for the few
//! things a daemon of root's has to do where a user could have a say.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::output::exit_now;

/// A user and that user's group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ids {
    uid: libc::uid_t,
    gid: libc::gid_t,
}

impl Ids {
    /// Those that this process acts with.
    pub fn effective() -> Ids {
        // SAFETY: both take nothing and cannot fail.
        unsafe { Ids { uid: libc::geteuid(), gid: libc::getegid() } }
    }
}

/// What a child ends with that could not become the user.
const NOT_DROPPED: u8 = 255;

/// How long the end of a killed child is waited for. Afterwards it is left to
/// slurmstepd, which reaps every child of its own and asks whether it was a task.
const REAP: Duration = Duration::from_millis(50);

/// Forks a child that becomes `ids`, without other groups, capabilities or a way back,
/// closes every descriptor, does `work` and ends with its code. After `limit` it is
/// killed: then, and when it died, the answer is `None`.
///
/// The caller's own system calls, all of them here: fork, clock_gettime, wait4 for this
/// child alone, clock_nanosleep, and kill for one that is late. The child's until it is
/// the user: prctl, close_range, setgroups, setresgid, setresuid, getresuid, getresgid.
///
/// # Errors
/// When there is no child, or it could not become the user.
pub fn run(ids: Ids, limit: Duration, work: impl FnOnce() -> u8) -> io::Result<Option<u8>> {
    let end = Instant::now() + limit;
    // SAFETY: getpid takes nothing and cannot fail.
    let parent = unsafe { libc::getpid() };
    // SAFETY: fork takes no pointers. The child leaves by _exit.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if pid == 0 {
        let code = if become_user(ids, parent) {
            catch_unwind(AssertUnwindSafe(work)).unwrap_or(NOT_DROPPED - 1)
        } else {
            NOT_DROPPED
        };
        exit_now(i32::from(code));
    }
    let ended = wait_until(pid, end).or_else(|| {
        // SAFETY: our own child, not waited for yet: the number is nobody else's.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        wait_until(pid, Instant::now() + REAP).and(None)
    });
    match ended.filter(|status| libc::WIFEXITED(*status)).map(|status| libc::WEXITSTATUS(status)) {
        Some(code) if code == i32::from(NOT_DROPPED) => Err(io::Error::other("a child could not become the user")),
        code => Ok(code.and_then(|code| u8::try_from(code).ok())),
    }
}

/// The child's status, if it ends by then.
fn wait_until(pid: libc::pid_t, end: Instant) -> Option<libc::c_int> {
    let mut pause = Duration::from_micros(100);
    let mut status = 0;
    loop {
        // SAFETY: a status that lives through the call.
        match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
            0 if Instant::now() < end => std::thread::sleep(pause),
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            0 | -1 => return None,
            _ => return Some(status),
        }
        pause = (pause * 2).min(Duration::from_micros(500));
    }
}

/// In the child. System calls, not libc's functions for them: those tell the threads of
/// the process, of which the child has but one.
fn become_user(ids: Ids, parent: libc::pid_t) -> bool {
    // First: it holds a copy of the daemon's memory. The kernel keeps others of the same
    // user out of it, and it cannot get more rights.
    // SAFETY: takes numbers only.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0);
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return false;
        }
    }
    close_all();
    // SAFETY: takes nothing.
    if unsafe { libc::geteuid() } == 0 || unsafe { libc::getuid() } == 0 {
        // SAFETY: no groups are read, and numbers set.
        let set = unsafe {
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) == 0
                && libc::syscall(libc::SYS_setresgid, ids.gid, ids.gid, ids.gid) == 0
                && libc::syscall(libc::SYS_setresuid, ids.uid, ids.uid, ids.uid) == 0
        };
        if !set {
            return false;
        }
    }
    let (mut uids, mut gids) = ([!ids.uid; 3], [!ids.gid; 3]);
    // SAFETY: three numbers each, which live through the calls.
    unsafe {
        libc::getresuid(&raw mut uids[0], &raw mut uids[1], &raw mut uids[2]);
        libc::getresgid(&raw mut gids[0], &raw mut gids[1], &raw mut gids[2]);
    }
    if uids != [ids.uid; 3] || gids != [ids.gid; 3] {
        return false;
    }
    // SAFETY: takes numbers only; no user but root gets there.
    if ids.uid != 0 && unsafe { libc::syscall(libc::SYS_setresuid, 0, 0, 0) } == 0 {
        return false;
    }
    // Now: the kernel forgets both when the user changes.
    // SAFETY: takes numbers only.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
    // SAFETY: takes nothing. 0: a parent in another pid namespace.
    let now = unsafe { libc::getppid() };
    now == parent || now == 0
}

/// Nothing of the daemon's stays open: not its connections, nor the tasks' output.
fn close_all() {
    // SAFETY: closes numbers, which nothing in this process uses any more.
    if unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0) } == 0 {
        return;
    }
    // Before Linux 5.9. The daemon's own limit may be a million, so the first thousand.
    for number in 0..1024 {
        // SAFETY: as above.
        unsafe { libc::close(number) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::shared::SharedWords;
    use std::sync::atomic::Ordering;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn the_child_s_code_comes_back() {
        assert_eq!(run(Ids::effective(), LONG, || 7).unwrap(), Some(7));
    }

    #[test]
    fn one_that_is_late_is_killed_and_reaped() {
        let start = Instant::now();
        let pid = SharedWords::new(1).unwrap();
        let late = run(Ids::effective(), Duration::from_millis(200), || {
            pid.all()[0].store(std::process::id(), Ordering::Release);
            loop {
                std::thread::sleep(LONG);
            }
        });
        assert_eq!(late.unwrap(), None);
        assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
        let pid = pid.all()[0].load(Ordering::Acquire);
        assert!(pid != 0 && !std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_panic_and_a_death_are_no_answer() {
        assert_eq!(run(Ids::effective(), LONG, || panic!("no")).unwrap(), Some(254));
        // SAFETY: ends the child of this test.
        assert_eq!(run(Ids::effective(), LONG, || unsafe { libc::abort() }).unwrap(), None);
    }

    /// As another process's own children: who waits for one must not get the other's.
    #[test]
    fn another_child_is_left_to_who_waits_for_it() {
        let mut other = std::process::Command::new("true").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(run(Ids::effective(), LONG, || 3).unwrap(), Some(3));
        assert!(other.wait().unwrap().success());
    }

    #[test]
    fn root_is_given_up_for_good() {
        if Ids::effective().uid != 0 {
            println!("skipped: root only can give root up");
            return;
        }
        let nobody = Ids { uid: 65534, gid: 65534 };
        let open = std::fs::File::open("/etc/shadow").unwrap();
        let code = run(nobody, LONG, || {
            let said = std::fs::read_to_string("/proc/self/status");
            // SAFETY: takes numbers only.
            let hidden = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) } == 0;
            let said = said.unwrap_or_default();
            let value = |name: &str| {
                let line = said.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("?");
                line.split_whitespace().collect::<Vec<_>>().join(" ")
            };
            let user = value("Uid:") == "65534 65534 65534 65534" && value("Gid:") == "65534 65534 65534 65534";
            let none = "0000000000000000";
            let caps = value("CapPrm:") == none && value("CapEff:") == none && value("CapAmb:") == none;
            // SAFETY: takes numbers only, and no pointer is followed for none.
            let back = unsafe { libc::setuid(0) == 0 || libc::setgid(0) == 0 };
            // SAFETY: a number that was closed.
            let closed = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&open), libc::F_GETFD) } == -1;
            let checks = [
                user && caps,
                value("Groups:").is_empty(),
                value("NoNewPrivs:") == "1",
                !back,
                closed,
                std::fs::File::open("/etc/shadow").is_err(),
                hidden,
            ];
            checks.iter().fold(0, |bits, good| bits << 1 | u8::from(*good))
        });
        assert_eq!(code.unwrap().map(|bits| format!("{bits:07b}")), Some("1111111".into()));
    }
}
