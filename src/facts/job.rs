//! What the controller says of a job and of nodes, in scontrol's one-line form: it is the
//! same in all releases, where the structures behind it are not.
//!
//! Times are taken as seconds since 1970, which `SLURM_TIME_FORMAT=%s` makes scontrol
//! print.

/// A job, or a component of one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Job {
    /// HetJobId: the first component's number, in a het job.
    pub het: Option<u32>,
    /// JobState.
    pub state: String,
    /// Reason.
    pub reason: String,
    /// EndTime, seconds since 1970, where it is known: of a running job the one to come.
    pub end: Option<u64>,
    /// PreemptTime, where it was preempted.
    pub preempted: Option<u64>,
}

/// The jobs in `scontrol show job -o`: several of a het job.
pub fn jobs(text: &str) -> Vec<Job> {
    let time = |value: &str| value.parse::<u64>().ok().filter(|time| *time > 0);
    text.lines()
        .filter(|line| line.starts_with("JobId="))
        .map(|line| {
            let value = |name: &'static str| values(line, name).next();
            Job {
                het: value("HetJobId=").and_then(|id| id.parse().ok()),
                state: value("JobState=").unwrap_or_default().into(),
                reason: value("Reason=").unwrap_or_default().into(),
                end: value("EndTime=").and_then(time),
                preempted: value("PreemptTime=").and_then(time),
            }
        })
        .collect()
}

/// The nodes in `scontrol show node -o` that do not answer or are down.
pub fn lost(text: &str) -> Vec<String> {
    let is_lost = |state: &str| state.contains('*') || state.starts_with("DOWN") || state.contains("NOT_RESPONDING");
    text.lines()
        .filter(|line| values(line, "State=").any(is_lost))
        .filter_map(|line| values(line, "NodeName=").next().map(String::from))
        .collect()
}

fn values<'a>(line: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    line.split_whitespace().filter_map(move |word| word.strip_prefix(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of scontrol 22.05.8, shortened.
    #[test]
    fn scontrol_s_lines() {
        let text = "JobId=2 JobName=b.sh UserId=trainer(1001) Priority=4294901758 JobState=COMPLETING Reason=None \
                    Dependency=(null) Requeue=1 Restarts=0 ExitCode=0:0 RunTime=00:00:01 StartTime=1796031702 \
                    EndTime=1796031703 Deadline=N/A PreemptEligibleTime=1796031702 PreemptTime=None NodeList=n1\n\n\
                    JobId=3 HetJobId=2 HetJobOffset=1 JobState=RUNNING Reason=None ExitCode=1:0 EndTime=Unknown PreemptTime=1796031800 Command=a JobId=9\n";
        let found = jobs(text);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].state.as_str(), found[0].reason.as_str()), ("COMPLETING", "None"));
        assert_eq!((found[0].end, found[0].preempted), (Some(1_796_031_703), None));
        assert_eq!((found[0].het, found[1].het), (None, Some(2)));
        assert_eq!((found[1].end, found[1].preempted), (None, Some(1_796_031_800)));
        assert!(jobs("slurm_load_jobs error: Invalid job id specified\n").is_empty());
        let nodes = "NodeName=n1 Arch=x86_64 CPUAlloc=4 State=ALLOCATED ThreadsPerCore=1\n\
                     NodeName=n2 State=ALLOCATED* Reason=x\nNodeName=n3 State=DOWN+NOT_RESPONDING\nNodeName=n4 State=IDLE+DRAIN\n";
        assert_eq!(lost(nodes), ["n2", "n3"]);
    }
}
