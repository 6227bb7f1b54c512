//! What the tasks of a step found in their environment, and whether their rank
//! variables agree with what Slurm itself says of each task.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Said, Sandbox};

/// The variables that only a rank has.
pub const RANK_VARIABLES: [&str; 8] =
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"];

/// Slurm gives a job other nodes than it would while an earlier one still
/// completes on them: each command waits for that first.
const SETTLED: &str = "settled() { while squeue -h -t completing | grep -q .; do sleep 0.05; done; }
srun() { settled; command srun \"$@\"; }
salloc() { settled; command salloc \"$@\"; }
sbatch() { settled; command sbatch \"$@\"; }
";

/// The environment of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task(BTreeMap<String, String>);

impl Task {
    fn parse(text: &str) -> Task {
        let pairs = text.split('\0').filter_map(|pair| pair.split_once('='));
        Task(pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect())
    }

    /// The variable's value, if set.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// A variable that must be a number.
    #[track_caller]
    pub fn number(&self, name: &str) -> u32 {
        let value = self.get(name).unwrap_or_else(|| panic!("{name} is not set:\n{self}"));
        value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number"))
    }

    /// All variables.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Asserts that the process has no rank variable.
    #[track_caller]
    pub fn is_no_rank(&self) {
        for name in RANK_VARIABLES {
            assert_eq!(self.get(name), None, "{name} is set in a process that is no rank");
        }
    }

    /// Asserts that the plugin did nothing for this process.
    #[track_caller]
    pub fn is_untouched(&self) {
        self.is_no_rank();
        for (name, value) in self.iter() {
            let ours = name.starts_with("NCCL_")
                || name.starts_with("TORCH")
                || name.starts_with("CUDA_")
                || name.starts_with("TRITON_")
                || name.starts_with("PET_")
                || name.starts_with("OMP_")
                || name.starts_with("PYTHON")
                || name.starts_with("SLURM_PALINGENESIS_")
                || name == "PALINGENESIS_SET";
            assert!(!ours, "{name}={value} in a process without the flag");
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|(name, value)| writeln!(f, "  {name}={value}"))
    }
}

/// What a command line did.
#[derive(Debug)]
pub struct Run {
    /// Its exit code and words.
    pub said: Said,
    /// The processes that recorded themselves, by label.
    labels: BTreeMap<String, Vec<Task>>,
}

impl Run {
    /// The processes that recorded themselves as `label`.
    #[track_caller]
    pub fn tasks(&self, label: &str) -> &[Task] {
        self.labels.get(label).unwrap_or_else(|| {
            let labels: Vec<_> = self.labels.keys().collect();
            panic!("no process recorded itself as {label}, only {labels:?}; {:#?}", self.said)
        })
    }

    /// The only process that recorded itself as `label`.
    #[track_caller]
    pub fn task(&self, label: &str) -> &Task {
        let [task] = self.tasks(label) else { panic!("{} processes are {label}", self.tasks(label).len()) };
        task
    }

    /// The labels there are.
    pub fn labels(&self) -> Vec<&str> {
        self.labels.keys().map(String::as_str).collect()
    }
}

/// Where the processes of one command line record themselves.
struct Recorder {
    folder: PathBuf,
}

impl Recorder {
    /// A folder that every node sees, and in it a program that writes its
    /// environment to a file of its own: output through srun may be cut and
    /// mixed, and `--export=NONE` leaves a task no PATH.
    fn new(sandbox: &Sandbox) -> Recorder {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let folder = sandbox.dir().join(format!("home/records-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o1777)).unwrap();
        let program = folder.join("record");
        fs::write(&program, format!("#!/bin/sh\nexec /usr/bin/env -0 >\"{}/$1.$$\"\n", folder.display())).unwrap();
        fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        Recorder { folder }
    }

    /// `RECORD` becomes the program, `FOLDER` the folder.
    fn written_out(&self, text: &str) -> String {
        let folder = self.folder.to_str().unwrap();
        text.replace("RECORD", &format!("{folder}/record")).replace("FOLDER", folder)
    }

    fn found(self, said: Said) -> Run {
        let mut labels: BTreeMap<String, Vec<Task>> = BTreeMap::new();
        for entry in fs::read_dir(&self.folder).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if let Some((label, process)) = name.split_once('.')
                && process.bytes().all(|byte| byte.is_ascii_digit())
            {
                let text = String::from_utf8(fs::read(entry.path()).unwrap()).unwrap();
                labels.entry(label.to_string()).or_default().push(Task::parse(&text));
            }
        }
        for tasks in labels.values_mut() {
            tasks.sort_by_key(|task| task.get("SLURM_PROCID").and_then(|rank| rank.parse::<u32>().ok()));
        }
        Run { said, labels }
    }
}

impl Sandbox {
    /// Runs a bash command line as the unprivileged user, in which `RECORD L`
    /// stands for a program that records its environment under the label L,
    /// and `FOLDER` for the folder of the records. Every command must succeed.
    #[track_caller]
    pub fn record(&self, line: &str) -> Run {
        let run = self.try_record(&format!("set -e\n{line}"));
        assert_eq!(run.said.code, 0, "{line}\nstdout:\n{}\nstderr:\n{}", run.said.out, run.said.err);
        run
    }

    /// The same where the line may fail.
    pub fn try_record(&self, line: &str) -> Run {
        let recorder = Recorder::new(self);
        let said = self.run(&recorder.written_out(&format!("{SETTLED}{line}")));
        recorder.found(said)
    }

    /// Submits a batch script and waits until `jobs` jobs have run it (an array
    /// is several); `said.out` is their output. Not by `sbatch --wait`, which
    /// looks every 2 s only.
    #[track_caller]
    pub fn batch(&self, options: &str, jobs: u32, script: &str) -> Run {
        let recorder = Recorder::new(self);
        // #SBATCH lines count up to the first command only.
        let (head, body): (Vec<&str>, Vec<&str>) =
            script.lines().map(str::trim).partition(|line| line.starts_with("#SBATCH"));
        let mark = "trap 'echo $? >FOLDER/code.$SLURM_JOB_ID.new; mv FOLDER/code.$SLURM_JOB_ID{.new,.done}' EXIT";
        let text = format!("#!/bin/bash\n{}\n{mark}\nset -e\n{}\n", head.join("\n"), body.join("\n"));
        fs::write(recorder.folder.join("script"), recorder.written_out(&text)).unwrap();
        let line = format!(
            "sbatch --parsable -o FOLDER/output.%j.log {options} FOLDER/script >FOLDER/id || exit
             until set -- FOLDER/code.*.done; [ -e $1 ] && [ $# -ge {jobs} ]; do sleep 0.1; done
             cat FOLDER/output.*.log
             exit $(cat FOLDER/code.*.done | sort -n | tail -n 1)"
        );
        let said = self.run(&recorder.written_out(&format!("{SETTLED}{line}")));
        assert_eq!(said.code, 0, "{script}\nstdout:\n{}\nstderr:\n{}", said.out, said.err);
        recorder.found(said)
    }

    /// `scontrol show hostnames`: Slurm's own expansion.
    #[track_caller]
    pub fn hostnames(&self, list: &str) -> Vec<String> {
        let said = self.run(&format!("scontrol show hostnames '{list}'")).ok();
        said.out.lines().map(String::from).collect()
    }

    /// Asserts that every task of a step has the right ranks, host and port.
    #[track_caller]
    pub fn check(&self, tasks: &[Task]) -> Layout {
        let layout = self.check_ranks(tasks);
        for task in tasks {
            assert_eq!(task.get("MASTER_ADDR"), Some(layout.node_of(0)), "MASTER_ADDR is not rank 0's node:\n{task}");
        }
        assert!((20000..=31999).contains(&layout.port), "MASTER_PORT={}", layout.port);
        layout
    }

    /// The same for any host and port, as long as all ranks have the same port.
    #[track_caller]
    pub fn check_ranks(&self, tasks: &[Task]) -> Layout {
        let first = tasks.first().expect("the step has a task");
        let hosts = self.hostnames(first.get("SLURM_STEP_NODELIST").unwrap());
        let per_node = tasks_per_node(first.get("SLURM_STEP_TASKS_PER_NODE").unwrap());
        assert_eq!(hosts.len(), per_node.len(), "Slurm contradicts itself:\n{first}");
        let mut nodes: BTreeMap<u32, (String, Vec<u32>)> = BTreeMap::new();
        let mut local_ranks: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for task in tasks {
            let same = |ours: &str, slurms: &str| assert_eq!(task.get(ours), task.get(slurms), "{ours}:\n{task}");
            same("RANK", "SLURM_PROCID");
            same("LOCAL_RANK", "SLURM_LOCALID");
            same("NODE_RANK", "SLURM_NODEID");
            same("GROUP_RANK", "SLURM_NODEID");
            assert_eq!(task.number("WORLD_SIZE"), tasks.len() as u32, "WORLD_SIZE:\n{task}");
            let (node, name) = (task.number("NODE_RANK"), task.get("SLURMD_NODENAME").unwrap());
            assert!(hosts.iter().any(|host| host == name), "{name} is not in {hosts:?}");
            assert_eq!(task.get("MASTER_PORT"), first.get("MASTER_PORT"), "MASTER_PORT:\n{task}");
            for (variable, _) in task.iter() {
                assert!(!variable.starts_with("SLURM_PALINGENESIS_"), "{variable} was left in the task");
            }
            let place = nodes.entry(node).or_insert_with(|| (name.to_string(), Vec::new()));
            assert_eq!(place.0, name, "two nodes with one NODE_RANK");
            place.1.push(task.number("RANK"));
            assert!(
                local_ranks.entry(node).or_default().insert(task.number("LOCAL_RANK")),
                "LOCAL_RANK twice:\n{task}"
            );
        }
        for task in tasks {
            let (name, ranks) = &nodes[&task.number("NODE_RANK")];
            assert_eq!(task.number("LOCAL_WORLD_SIZE"), ranks.len() as u32, "LOCAL_WORLD_SIZE:\n{task}");
            // Both lists are sorted by name.
            let place = hosts.iter().position(|host| host == name).unwrap();
            assert_eq!(per_node[place], ranks.len() as u32, "SLURM_STEP_TASKS_PER_NODE:\n{task}");
        }
        for (node, found) in &local_ranks {
            assert!(found.iter().copied().eq(0..found.len() as u32), "LOCAL_RANKs of node {node}: {found:?}");
        }
        assert!(nodes.keys().copied().eq(0..hosts.len() as u32), "nodes with tasks: {nodes:?} of {hosts:?}");
        let mut ranks: Vec<u32> = tasks.iter().map(|task| task.number("RANK")).collect();
        ranks.sort_unstable();
        assert!(ranks.iter().copied().eq(0..tasks.len() as u32), "RANKs: {ranks:?}");
        let port = first.number("MASTER_PORT").try_into().unwrap();
        Layout { nodes: nodes.into_values().collect(), port }
    }
}

/// The notation of SLURM_STEP_TASKS_PER_NODE, `2(x3),1`, by itself: the
/// library's own reader is what is under test.
fn tasks_per_node(text: &str) -> Vec<u32> {
    let mut counts = Vec::new();
    for part in text.split(',') {
        let (count, times) = part.split_once("(x").unwrap_or((part, "1)"));
        let times: usize = times.trim_end_matches(')').parse().unwrap();
        counts.resize(counts.len() + times, count.parse().unwrap());
    }
    counts
}

/// Where the ranks of a step are.
#[derive(Debug, Clone)]
pub struct Layout {
    nodes: Vec<(String, Vec<u32>)>,
    /// MASTER_PORT of every rank.
    pub port: u16,
}

impl Layout {
    /// The node of a rank.
    pub fn node_of(&self, rank: u32) -> &str {
        let found = self.nodes.iter().find(|(_, ranks)| ranks.contains(&rank));
        found.map(|(node, _)| node.as_str()).unwrap_or_else(|| panic!("there is no rank {rank}"))
    }
}

/// In order of NODE_RANK: `node001 0,1; node002 2`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (node, ranks)) in self.nodes.iter().enumerate() {
            let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
            write!(f, "{}{node} {}", if index == 0 { "" } else { "; " }, ranks.join(","))?;
        }
        Ok(())
    }
}
