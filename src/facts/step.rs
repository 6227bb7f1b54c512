//! The step as Slurm tells it to a task: counts, ids and the node list from the
//! task's own SLURM_* variables, which slurmstepd sets for every task under
//! every `--export`. SPANK's items are per het component and would be wrong in
//! a combined het step; job-level variables describe the job, not the step.

use thiserror::Error;

use super::Environment;
use super::hostlist::{self, HostlistError, TasksPerNode};

/// One task's place in its step.
#[derive(Debug, Clone)]
pub struct Step {
    /// SLURM_JOB_ID; in a combined het step the leader's, for all components.
    pub job_id: u32,
    /// SLURM_STEP_ID.
    pub step_id: u32,
    /// SLURM_PROCID: global rank, 0 to `world_size - 1`.
    pub rank: u32,
    /// SLURM_LOCALID: rank among the node's tasks.
    pub local_rank: u32,
    /// SLURM_NODEID: index of the node in the step.
    pub node_rank: u32,
    /// SLURM_STEP_NUM_TASKS.
    pub world_size: u32,
    /// Tasks on each node of `node_list`, from SLURM_STEP_TASKS_PER_NODE.
    pub tasks_per_node: TasksPerNode,
    /// Tasks on this node.
    pub local_world_size: u32,
    /// SLURM_STEP_NODELIST as Slurm writes it: sorted, and so in order of node
    /// index but for a combined het step, which counts its nodes component by
    /// component.
    pub node_list: String,
    /// NodeName of this task's node.
    pub node: String,
    /// SLURM_JOB_NODELIST, to recognise a host of the job outside the step.
    pub job_node_list: Option<String>,
    /// The job's het components' node lists, in order; empty in other jobs.
    pub components: Vec<String>,
    /// Whether the step has several het components, as srun said: then its first
    /// node need not be the first of `node_list`.
    pub het: bool,
    /// Whether `-m arbitrary` or a host file chose the layout: then rank 0 need
    /// not be on the first node.
    pub arbitrary: bool,
    /// Whether the step has a pseudo terminal.
    pub pty: bool,
    /// Whether srun's standard input is a terminal, as srun said.
    pub terminal: bool,
    /// Whether each task's program comes from the file of `--multi-prog`, as srun
    /// said.
    pub multi_prog: bool,
}

/// Why there is no step to plan for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StepError {
    /// No Slurm job at all.
    #[error("not inside a Slurm job: SLURM_JOB_ID is not set; start the program with srun --palingenesis")]
    NoJob,
    /// In a job, but not in a step: a batch script or a salloc shell.
    #[error(
        "inside job {job}, but outside a step: {missing} is not set, so there are no ranks here; \
         launch the training with srun --palingenesis"
    )]
    NoStep {
        /// SLURM_JOB_ID.
        job: String,
        /// The first step variable that is missing.
        missing: &'static str,
    },
    /// The batch script's, extern or interactive step.
    #[error(
        "step {step} of job {job} has no ranks: it is the job's own shell; launch the training with srun --palingenesis"
    )]
    SpecialStep {
        /// SLURM_JOB_ID.
        job: u32,
        /// SLURM_STEP_ID.
        step: u32,
    },
    /// A variable that Slurm sets is missing in a step.
    #[error(
        "{name} is not set in this step, though Slurm sets it for every task; was it unset by the task's own environment?"
    )]
    Missing {
        /// The variable.
        name: &'static str,
    },
    /// A variable's value is not what Slurm writes.
    #[error("{name}={value} is not {expected}")]
    Malformed {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A list that does not parse.
    #[error("{name}: {source}")]
    List {
        /// The variable.
        name: &'static str,
        /// What is wrong with it.
        source: HostlistError,
    },
    /// Values that cannot hold together.
    #[error("the step's variables contradict each other: {0}")]
    Inconsistent(String),
    /// A description of a step that cannot be.
    #[error("no such step: {0}")]
    NoSuchStep(String),
}

/// Ids from here on belong to the batch script, the extern and the interactive
/// step (SLURM_INTERACTIVE_STEP and up in slurm.h).
pub const FIRST_SPECIAL_STEP: u32 = 0xffff_fffa;

impl Step {
    /// The step of the task whose environment this is.
    ///
    /// # Errors
    /// Outside a step, and when Slurm's variables are missing, malformed or
    /// contradict each other.
    pub fn from_environment(environment: &Environment) -> Result<Step, StepError> {
        let Some(job) = environment.get("SLURM_JOB_ID") else {
            return Err(StepError::NoJob);
        };
        // The batch script has PROCID, LOCALID and NODEID too, but no SLURM_STEP_*.
        for missing in ["SLURM_STEP_ID", "SLURM_STEP_NODELIST"] {
            if environment.get(missing).is_none() {
                return Err(StepError::NoStep { job: job.into(), missing });
            }
        }
        let number = |name| number(environment, name);
        let (job_id, step_id) = (number("SLURM_JOB_ID")?, number("SLURM_STEP_ID")?);
        if step_id >= FIRST_SPECIAL_STEP {
            return Err(StepError::SpecialStep { job: job_id, step: step_id });
        }
        let node_list = text(environment, "SLURM_STEP_NODELIST")?.to_string();
        let tasks_per_node = TasksPerNode::parse(text(environment, "SLURM_STEP_TASKS_PER_NODE")?)
            .map_err(|source| StepError::List { name: "SLURM_STEP_TASKS_PER_NODE", source })?;
        let step = Step {
            job_id,
            step_id,
            rank: number("SLURM_PROCID")?,
            local_rank: number("SLURM_LOCALID")?,
            node_rank: number("SLURM_NODEID")?,
            world_size: number("SLURM_STEP_NUM_TASKS")?,
            local_world_size: 0,
            tasks_per_node,
            node: environment.get("SLURMD_NODENAME").unwrap_or_default().to_string(),
            node_list,
            job_node_list: environment.get("SLURM_JOB_NODELIST").map(String::from),
            components: components(environment),
            het: false,
            arbitrary: environment.get("SLURM_DISTRIBUTION").is_some_and(|d| d.starts_with("arbitrary")),
            pty: environment.get("SLURM_PTY_PORT").is_some(),
            terminal: false,
            multi_prog: false,
        };
        step.completed()
    }

    /// A step described by hand: rank `rank` of the tasks spread in blocks over
    /// the nodes of `node_list`.
    ///
    /// # Errors
    /// Lists that do not parse or do not fit together, a rank outside the step.
    pub fn described(
        node_list: &str,
        tasks_per_node: &str,
        rank: u32,
        job_id: u32,
        step_id: u32,
    ) -> Result<Step, StepError> {
        let tasks = TasksPerNode::parse(tasks_per_node)
            .map_err(|source| StepError::List { name: "--tasks-per-node", source })?;
        // One number for all nodes is what people write for an even layout.
        let nodes = hostlist::count(node_list).map_err(|source| StepError::List { name: "--nodelist", source })?;
        let tasks = match (tasks.nodes(), nodes) {
            (1, 2..) => TasksPerNode::parse(&format!("{}(x{nodes})", tasks.get(0).unwrap_or(0)))
                .map_err(|source| StepError::List { name: "--tasks-per-node", source })?,
            _ => tasks,
        };
        if tasks.nodes() != nodes {
            return Err(StepError::NoSuchStep(format!(
                "--nodelist has {nodes} nodes, --tasks-per-node counts the tasks of {}; write 8(x{nodes}) for 8 on each",
                tasks.nodes()
            )));
        }
        let world_size = u32::try_from(tasks.total())
            .map_err(|_| StepError::NoSuchStep(format!("{} tasks are more than Slurm can number", tasks.total())))?;
        let mut first = 0;
        let place = tasks.iter().enumerate().find_map(|(node, tasks)| {
            let here = (rank < first + tasks).then_some((node as u32, rank.wrapping_sub(first)));
            first += tasks;
            here
        });
        let Some((node_rank, local_rank)) = place else {
            let why = match world_size.checked_sub(1) {
                Some(last) => format!("rank {rank} is not one of its {world_size} ranks; --rank goes from 0 to {last}"),
                None => "it has no tasks".to_string(),
            };
            return Err(StepError::NoSuchStep(why));
        };
        let step = Step {
            job_id,
            step_id,
            rank,
            local_rank,
            node_rank,
            world_size,
            local_world_size: 0,
            tasks_per_node: tasks,
            node: String::new(),
            node_list: node_list.to_string(),
            job_node_list: None,
            components: Vec::new(),
            het: false,
            arbitrary: false,
            pty: false,
            terminal: false,
            multi_prog: false,
        };
        step.completed()
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.tasks_per_node.nodes() as u32
    }

    /// Whether every node has exactly one task.
    pub fn one_task_on_each_node(&self) -> bool {
        self.most_tasks_on_a_node() == 1 && self.world_size == self.nodes()
    }

    /// The most tasks on one node.
    pub fn most_tasks_on_a_node(&self) -> u32 {
        self.tasks_per_node.iter().max().unwrap_or(0)
    }

    /// Fills what follows from the rest, and checks that all of it can be true.
    fn completed(mut self) -> Result<Step, StepError> {
        let wrong = |why: String| Err(StepError::Inconsistent(why));
        let hosts = hostlist::expand(&self.node_list)
            .map_err(|source| StepError::List { name: "SLURM_STEP_NODELIST", source })?;
        let nodes = hosts.len();
        if nodes != self.tasks_per_node.nodes() {
            return wrong(format!(
                "the node list {} has {nodes} nodes, the tasks per node speak of {}",
                crate::config::printable(&self.node_list),
                self.tasks_per_node.nodes()
            ));
        }
        if self.tasks_per_node.total() != u64::from(self.world_size) {
            return wrong(format!(
                "{} tasks in all, but the tasks per node add up to {}",
                self.world_size,
                self.tasks_per_node.total()
            ));
        }
        let node_rank = self.node_rank as usize;
        if node_rank >= nodes {
            return wrong(format!("node {node_rank} of {nodes} nodes"));
        }
        let place = hosts.iter().position(|host| *host == self.node).unwrap_or(node_rank);
        let here = self.tasks_per_node.get(place).unwrap_or(0);
        if self.rank >= self.world_size {
            return wrong(format!("rank {} of {} ranks", self.rank, self.world_size));
        }
        if self.local_rank >= here {
            return wrong(format!("local rank {} of {here} tasks on node {}", self.local_rank, self.node_rank));
        }
        self.local_world_size = here;
        if self.node.is_empty() {
            self.node = hosts.into_iter().nth(node_rank).unwrap_or_default();
        }
        Ok(self)
    }
}

/// SLURM_JOB_NODELIST_HET_GROUP_0 and so on, where srun made the job itself
/// under their older name.
fn components(environment: &Environment) -> Vec<String> {
    let list = |number| {
        let names = ["HET", "PACK"].map(|kind| format!("SLURM_JOB_NODELIST_{kind}_GROUP_{number}"));
        names.iter().find_map(|name| environment.get(name).map(String::from))
    };
    (0u32..).map_while(list).collect()
}

fn text<'a>(environment: &'a Environment, name: &'static str) -> Result<&'a str, StepError> {
    environment.get(name).ok_or(StepError::Missing { name })
}

fn number(environment: &Environment, name: &'static str) -> Result<u32, StepError> {
    let value = text(environment, name)?;
    value.parse().map_err(|_| StepError::Malformed {
        name,
        value: value.chars().take(80).collect(),
        expected: "a number",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables Slurm 22.05 sets for a task of `srun -N2 -n3` on n1 and n2.
    const TASK: [(&str, &str); 11] = [
        ("SLURM_JOB_ID", "44"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "1"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "0"),
        ("SLURM_STEP_NUM_TASKS", "3"),
        ("SLURM_STEP_NODELIST", "n[1-2]"),
        ("SLURM_STEP_TASKS_PER_NODE", "2,1"),
        ("SLURMD_NODENAME", "n1"),
        ("SLURM_JOB_NODELIST", "n[1-3]"),
        ("SLURM_DISTRIBUTION", "cyclic"),
    ];

    /// Variables to set, or with `None` to leave out.
    type Changes<'a> = &'a [(&'a str, Option<&'a str>)];

    fn with(changes: Changes) -> Result<Step, StepError> {
        let changed = |name: &str| changes.iter().find(|(changed, _)| *changed == name);
        let mut environment = Environment::default();
        for (name, value) in TASK.iter().filter(|(name, _)| changed(name).is_none()) {
            environment.set(*name, *value);
        }
        for (name, value) in changes {
            if let Some(value) = value {
                environment.set(*name, *value);
            }
        }
        Step::from_environment(&environment)
    }

    #[test]
    fn a_task_of_a_step() {
        let step = with(&[]).unwrap();
        assert_eq!((step.rank, step.world_size, step.local_rank, step.local_world_size), (1, 3, 1, 2));
        assert_eq!((step.node_rank, step.nodes(), step.node.as_str()), (0, 2, "n1"));
        assert!(!step.arbitrary && !step.pty);
    }

    /// <https://github.com/sehoffmann/dmlcloud/issues/39>
    #[test]
    fn tasks_per_node_with_a_repeat_count() {
        let step = with(&[
            ("SLURM_STEP_TASKS_PER_NODE", Some("1(x2)")),
            ("SLURM_STEP_NUM_TASKS", Some("2")),
            ("SLURM_LOCALID", Some("0")),
            ("SLURM_NODEID", Some("1")),
        ]);
        assert_eq!(step.unwrap().local_world_size, 1);
    }

    #[test]
    fn job_level_variables_are_not_looked_at() {
        let step =
            with(&[("SLURM_NTASKS", Some("99")), ("SLURM_NTASKS_PER_NODE", Some("7")), ("SLURM_NNODES", Some("9"))]);
        assert_eq!(step.unwrap().world_size, 3);
    }

    #[test]
    fn a_combined_het_step_counts_its_nodes_by_component_and_lists_them_by_name() {
        // Measured: node003 is component 0, node001 and node002 are component 1.
        let step = with(&[
            ("SLURM_PROCID", Some("3")),
            ("SLURM_LOCALID", Some("1")),
            ("SLURM_NODEID", Some("1")),
            ("SLURM_STEP_NUM_TASKS", Some("6")),
            ("SLURM_STEP_NODELIST", Some("node[001-003]")),
            ("SLURM_STEP_TASKS_PER_NODE", Some("3,1,2")),
            ("SLURMD_NODENAME", Some("node001")),
            ("SLURM_JOB_NODELIST_HET_GROUP_0", Some("node003")),
            ("SLURM_JOB_NODELIST_HET_GROUP_1", Some("node[001-002]")),
        ]);
        let step = step.unwrap();
        assert_eq!((step.local_world_size, step.node_rank), (3, 1));
        assert_eq!(step.components, ["node003", "node[001-002]"]);
    }

    #[test]
    fn outside_a_step() {
        assert_eq!(with(&[("SLURM_JOB_ID", None)]).unwrap_err(), StepError::NoJob);
        // The batch script: PROCID, LOCALID and NODEID are there, SLURM_STEP_* are not.
        let batch =
            with(&[("SLURM_STEP_ID", None), ("SLURM_STEP_NODELIST", None), ("SLURM_STEP_TASKS_PER_NODE", None)]);
        assert!(batch.unwrap_err().to_string().contains("srun --palingenesis"));
        let special = with(&[("SLURM_STEP_ID", Some("4294967291"))]);
        assert!(matches!(special, Err(StepError::SpecialStep { step: 0xffff_fffb, .. })));
    }

    #[test]
    fn what_cannot_be_true_is_an_error_that_names_it() {
        let table: [(Changes, &str); 9] = [
            (&[("SLURM_PROCID", None)], "SLURM_PROCID is not set"),
            (&[("SLURM_PROCID", Some("x"))], "SLURM_PROCID=x"),
            (&[("SLURM_PROCID", Some("3"))], "rank 3 of 3 ranks"),
            (&[("SLURM_LOCALID", Some("2"))], "local rank 2 of 2"),
            (&[("SLURM_NODEID", Some("2"))], "node 2 of 2"),
            (&[("SLURM_STEP_NUM_TASKS", Some("4"))], "4 tasks in all"),
            (&[("SLURM_STEP_NODELIST", Some("n[1-3]"))], "has 3 nodes"),
            (&[("SLURM_STEP_NODELIST", Some("n[1-"))], "SLURM_STEP_NODELIST"),
            (&[("SLURM_STEP_TASKS_PER_NODE", Some("2,"))], "SLURM_STEP_TASKS_PER_NODE"),
        ];
        for (changes, expected) in table {
            let message = with(changes).unwrap_err().to_string();
            assert!(message.contains(expected) && !message.contains('\n'), "{changes:?}: {message}");
        }
    }

    #[test]
    fn described_by_hand() {
        let step = Step::described("gpu[01-04]", "8(x4)", 9, 1, 0).unwrap();
        assert_eq!((step.node_rank, step.local_rank, step.node.as_str(), step.world_size), (1, 1, "gpu02", 32));
        // One number stands for every node.
        assert_eq!(Step::described("gpu[01-04]", "8", 9, 1, 0).unwrap().world_size, 32);
        assert!(Step::described("gpu[01-04]", "8(x4)", 32, 1, 0).unwrap_err().to_string().contains("rank 32"));
        assert!(Step::described("gpu[01-04]", "8(x3)", 0, 1, 0).is_err());
        assert!(Step::described("", "8", 0, 1, 0).is_err());
    }
}
