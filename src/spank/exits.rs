//! Records of ranks that ended badly: srun's socket, and what slurmstepd does when a
//! task has ended. It does that as root, so it does little, see [`ended`].

use std::net::IpAddr;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::Failure;
use super::gate::{Entry, Gate, Register};
use super::host::{self, Handle};
use super::kept::{self, lock};
use super::slurmstepd::{Node, TAKEN};
use super::srun::{EXITS, NONCE};
use crate::act::exits::{Destination, Listener, address_towards, send};
use crate::act::key::Key;
use crate::facts::exit::{Ended, ExitRecord, Oom};
use crate::facts::oom::{self, MemoryGroups};
use crate::facts::{Environment, Step};
use crate::plan::exits::{self, Kills};
use crate::plan::{Binding, exits::untold};
use crate::system::dropped::{self, Ids};

/// How long one record may take, from fork to the end of the child.
const ONE: Duration = Duration::from_millis(200);
/// How long a connection and what goes through it may take of that.
const SENDING: Duration = Duration::from_millis(150);
/// How long all records of a node may take that do not arrive: the step's end waits.
const ALL: Duration = Duration::from_secs(1);

/// srun's socket.
static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

/// srun: listens where `node` reaches this host, and says where. Without an address or a
/// port there are no records, and the nodes say so where a rank fails.
pub fn open(node: IpAddr) -> Option<String> {
    let mut listener = lock(&LISTENER);
    if listener.is_some() {
        return None;
    }
    let secret = Key::from_hex(std::env::var(NONCE.to_str().ok()?).ok()?.as_str())?;
    let own = address_towards(node)?;
    // So that several srun of one host do not all begin at the same port.
    let opened = Listener::open(own, host::srun_ports(), &secret, std::process::id()).ok()?;
    let address = opened.address().ok()?.to_string();
    *listener = Some(opened);
    Some(address)
}

/// srun: what the nodes have sent, in the order in which it came. The socket is closed.
pub fn collect() -> Vec<ExitRecord> {
    let listener = lock(&LISTENER).take();
    let records = listener.map(Listener::collect).unwrap_or_default();
    #[cfg(feature = "fault-injection")]
    super::fault::dump(&records);
    records
}

/// What slurmstepd knows before the tasks start.
#[derive(Debug)]
pub struct Reporter {
    to: Option<Destination>,
    /// Whose step it is.
    ids: Ids,
    groups: MemoryGroups,
    /// NodeName as far as slurmstepd knows it.
    name: String,
    node_rank: u32,
    /// Nanoseconds that records took which did not arrive.
    spent: AtomicU64,
    /// The user has been told of one that did not arrive.
    told: AtomicBool,
}

impl Reporter {
    /// As the user, in user_init: here, and nowhere later, is read what the user could
    /// have written.
    pub fn new(handle: Handle, environment: &Environment, root: &Path) -> Reporter {
        let handed = |name: &std::ffi::CStr| name.to_str().ok().and_then(|name| environment.get(name));
        let secret = handed(NONCE);
        // Of one that is absent the compiler may compare the length first, which nobody has
        // written: harmless, but valgrind tells of it.
        let known = std::hint::black_box(secret.unwrap_or_default());
        let own_name = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string();
        Reporter {
            to: handed(EXITS).zip(secret).and_then(|(address, secret)| Destination::parse(address, secret)),
            ids: Ids::effective(),
            groups: MemoryGroups::read(root),
            name: environment.get("SLURMD_NODENAME").map_or_else(own_name, String::from),
            node_rank: handle.node_index().unwrap_or(0),
            spent: AtomicU64::new(0),
            // A second copy of the plugin leaves it to the first.
            told: AtomicBool::new(known == TAKEN),
        }
    }
}

/// In a task: enters it in the register, as soon as it knows its rank.
pub fn enter(node: &Node, step: &Step) {
    let (Some(gate), Some(reporter)) = (&node.gate, &node.exits) else { return };
    gate.register().name(&step.node, step.node_rank);
    let Some(entry) = gate.register().of(step.local_rank) else { return };
    entry.enter(step.rank);
    let file = reporter.groups.file(&node.root).display().to_string();
    if let Some(kills) = oom::kills(&node.root, &file) {
        entry.watch(&file, kills);
    }
}

/// In a task: its plan is made.
pub fn planned(node: &Node, step: &Step, binding: &Binding, environment: &Environment) {
    let entry = node.gate.as_ref().and_then(|gate| gate.register().of(step.local_rank));
    if let Some((entry, gpu)) = entry.zip(exits::gpu(binding, environment, step.local_rank, step.local_world_size)) {
        entry.use_gpu(&gpu);
    }
}

/// In a task: it becomes the user's program now.
pub fn started(node: &Node, step: &Step) {
    if let Some(entry) = node.gate.as_ref().and_then(|gate| gate.register().of(step.local_rank)) {
        entry.start();
    }
}

/// As root, in task_exit: tells srun of a task that ended badly. Of one that ended well
/// nothing is done.
///
/// Root's system calls here are clock_gettime and those of [`dropped::run`], and, where
/// srun cannot be told, Slurm's own write of one line to the user's stderr. Nothing is
/// resolved, opened or parsed: a record is made of numbers, and of texts that our tasks
/// left in the gate, by length and with control characters taken out. What reads files
/// and connects is the child, as the user.
///
/// `stopped`: the start had been given up before this task ended.
pub fn ended(handle: Handle, node: &Node, task: u32, stopped: bool) -> Result<(), Failure> {
    let status = handle.exit_status()?;
    let (Some(gate), Some(reporter)) = (&node.gate, &node.exits) else { return Ok(()) };
    let register = gate.register();
    let entry = register.of(task);
    let Some(kind) = exits::ended(status, entry.is_some_and(Entry::started), stopped) else { return Ok(()) };
    // A second line of plugstack.conf calls us again.
    if entry.is_some_and(|entry| !entry.told_first()) {
        return Ok(());
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (name, node_rank) = register.named();
    let mut record = ExitRecord {
        // Without the offset of a het component, where the task did not get so far.
        rank: entry.and_then(Entry::rank).or_else(|| handle.task_rank().ok()).unwrap_or(task),
        node: name.unwrap_or_else(|| reporter.name.clone()),
        node_rank: node_rank.unwrap_or(reporter.node_rank),
        local_rank: task,
        gpu: entry.and_then(Entry::gpu),
        kind,
        time_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        oom: Oom::Unknown,
        clock: register.clock(),
        line: (kind == Ended::Refused).then(|| refusal(gate)).flatten(),
    };
    let why = match tell(reporter, register, entry, &node.root, &mut record) {
        Ok(()) => return Ok(()),
        Err(why) => why,
    };
    let srun = reporter.to.as_ref().map(|to| to.address.to_string());
    if let Some(line) = untold(&record, srun.as_deref(), &why)
        && !reporter.told.swap(true, Ordering::Relaxed)
    {
        host::log(&line);
    }
    Ok(())
}

/// What the user has read of why the node's ranks do not start.
fn refusal(gate: &Gate) -> Option<String> {
    let line = gate.refusal().or_else(kept::first)?;
    Some(line.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}

/// Sends the record, with what the kernel says of memory, from a child that is the user.
fn tell(
    reporter: &Reporter,
    register: Register,
    entry: Option<Entry>,
    root: &Path,
    record: &mut ExitRecord,
) -> Result<(), String> {
    let left = ALL.saturating_sub(Duration::from_nanos(reporter.spent.load(Ordering::Relaxed)));
    if left.is_zero() {
        return Err("earlier ones took too long".into());
    }
    let start = Instant::now();
    let outcome = dropped::run(reporter.ids, ONE.min(left), || {
        record.oom = memory(register, entry, root, record.kind);
        let sent = match &reporter.to {
            Some(to) => send(to, record, SENDING.min(left)),
            None => Err(std::io::Error::from_raw_os_error(libc::EDESTADDRREQ)),
        };
        Said { error: sent.err().map(number), oom: record.oom == Oom::Killed }.code()
    });
    let why = match outcome.map(|code| code.map(Said::of)) {
        Ok(Some(said)) => {
            if said.oom {
                record.oom = Oom::Killed;
            }
            match said.error {
                None => return Ok(()),
                Some(error) => text(error),
            }
        }
        Ok(None) => format!("no answer within {} ms", ONE.as_millis()),
        Err(error) => error.to_string(),
    };
    let spent = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    reporter.spent.fetch_add(spent, Ordering::Relaxed);
    Err(why)
}

/// The error's number; of one without a number EIO.
fn number(error: std::io::Error) -> u8 {
    let number = match error.kind() {
        std::io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        _ => error.raw_os_error().unwrap_or(libc::EIO),
    };
    u8::try_from(number).ok().filter(|number| *number != 0 && *number < 0x7f).unwrap_or(libc::EIO as u8)
}

/// The kernel's words, without Rust's.
fn text(error: u8) -> String {
    let text = std::io::Error::from_raw_os_error(error.into()).to_string();
    text.split(" (os error").next().unwrap_or_default().to_string()
}

/// A child's answer, as its exit code holds it.
struct Said {
    /// The error's number; `None` where srun has the record.
    error: Option<u8>,
    /// The kernel has killed for want of memory.
    oom: bool,
}

impl Said {
    fn code(self) -> u8 {
        self.error.unwrap_or(0) | u8::from(self.oom) << 7
    }

    fn of(code: u8) -> Said {
        Said { error: Some(code & 0x7f).filter(|error| *error != 0), oom: code & 0x80 != 0 }
    }
}

/// In the child: the file's name was left by a task.
fn memory(register: Register, entry: Option<Entry>, root: &Path, kind: Ended) -> Oom {
    let Some((entry, file)) = entry.and_then(|entry| Some((entry, entry.group()?))) else { return Oom::Unknown };
    // The ranks of one group count in one entry.
    let first = register.first_in(&file).unwrap_or(entry);
    let (oom, accounted) = exits::oom(
        kind,
        Kills {
            before: entry.kills_before(),
            now: oom::kills(root, &file),
            told: first.kills_told(),
            own: oom::is_own(&file),
        },
    );
    if accounted {
        first.tell_kill();
    }
    oom
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Error, ErrorKind};

    #[test]
    fn an_answer_survives_its_exit_code() {
        for oom in [false, true] {
            for error in [None, Some(1), Some(111)] {
                let said = Said::of(Said { error, oom }.code());
                assert_eq!((said.error, said.oom), (error, oom));
            }
        }
        assert_eq!(number(Error::from_raw_os_error(libc::ECONNREFUSED)), 111);
        assert_eq!(number(ErrorKind::TimedOut.into()), 110);
        assert_eq!(number(Error::other("x")), 5);
        // EHWPOISON would look like another answer.
        assert_eq!(number(Error::from_raw_os_error(133)), 5);
        assert_eq!(text(111), "Connection refused");
    }

    /// Two ranks in one memory group: the one that was killed, and one that failed after it.
    #[test]
    fn the_kernel_s_kill_is_one_rank_s() {
        let root = std::env::temp_dir().join(format!("palingenesis-exits-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        let file = "/memory.oom_control";
        std::fs::write(root.join("memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n").unwrap();
        let gate = Gate::new(3).unwrap();
        let entry = |rank| gate.register().of(rank);
        for rank in 0..2 {
            entry(rank).unwrap().watch(file, 0);
        }
        let memory = |rank, kind| memory(gate.register(), entry(rank), &root, kind);
        assert_eq!(memory(1, Ended::Signal(9)), Oom::Killed);
        assert_eq!(memory(0, Ended::Exit(1)), Oom::No);
        assert_eq!(memory(2, Ended::Exit(1)), Oom::Unknown);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
