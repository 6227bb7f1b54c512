//! CPUs that a step's tasks got on a real Slurm, and what is told of them: fewer
//! than the job asked for, or those of the step it was submitted from.
//!
//! The node pretends two sockets of one core, which this machine's two CPUs stand
//! for. What that cannot show: more CPUs than two.

mod common;

use common::{Said, Sandbox, library, slurm};

fn up(name: &str) -> Option<Sandbox> {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        println!("skipped: one CPU only: no task has fewer");
        return None;
    }
    let line = format!("optional {}", library().display());
    let shape = ["--nodes", "1", "--sockets", "2", "--cores", "1", "--plugstack"];
    Sandbox::up(&format!("cpus-{name}"), &[&shape[..], &[&line]].concat())
}

/// What a task prints: its mask, and its threads.
const TASK: &str = "sh -c 'echo cpus $(env -u OMP_NUM_THREADS nproc) threads $OMP_NUM_THREADS'";

/// Submits these lines as a batch script, behind `around`, and waits for what it
/// prints.
fn batch(sandbox: &Sandbox, lines: &str, around: &str) -> Said {
    sandbox
        .run(&format!(
            "cd; rm -f out; printf '%s\\n' '#!/bin/bash' {} 'echo done' >job
             {around} sbatch -Q -N1 -n1 -c2 -o $HOME/out $HOME/job
             for i in {{1..300}}; do grep -qs done out && break; sleep 0.1; done; cat out",
            quoted(lines)
        ))
        .ok()
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn of<'a>(said: &'a Said, id: &str) -> Vec<&'a str> {
    said.out.lines().filter(|line| line.ends_with(&format!("[{id}]"))).collect()
}

/// <https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/41>
#[test]
fn a_step_without_the_job_s_cpus_per_task_is_told_how_to_get_them() {
    let Some(sandbox) = up("asked") else { return };
    // Alone in its job a task without --exact has what the job has.
    let said = batch(&sandbox, &format!("srun -Q --exact --palingenesis {TASK}"), "");
    // srun(1) has SLURM_CPUS_PER_TASK as -c in 24.11, and not in 22.05.
    if slurm() >= (24, 11) {
        assert_eq!(said.out, "cpus 2 threads 2\ndone\n", "{said:#?}");
        return;
    }
    assert!(said.out.contains("cpus 1 threads 1\n"), "{said:#?}");
    let [line] = of(&said, "cpus-asked")[..] else { panic!("{said:#?}") };
    assert!(line.contains("the step's tasks have 1 CPU on n1, the job asked for 2"), "{line}");
    assert!(line.contains("use srun -c 2, or export SRUN_CPUS_PER_TASK=2"), "{line}");
    // Its cures cure.
    for srun in ["srun -Q --exact -c2", "SRUN_CPUS_PER_TASK=2 srun -Q --exact", "srun -Q"] {
        let said = batch(&sandbox, &format!("{srun} --palingenesis {TASK}"), "");
        assert_eq!(said.out, "cpus 2 threads 2\ndone\n", "{srun}: {said:#?}");
    }
}

/// <https://github.com/nebius/soperator/pull/2316>
#[test]
fn a_job_submitted_in_a_step_is_told_of_that_step_s_cpu_bind() {
    let Some(sandbox) = up("stale") else { return };
    let line = |srun: &str| format!("{srun} -c2 --palingenesis {TASK}");
    // The step ends before the job starts, which needs both CPUs.
    let inside = |lines: &str| batch(&sandbox, lines, "srun -Q -N1 -n1 -c1");
    let said = inside(&line("srun -Q"));
    assert!(said.out.contains("cpus 1 threads 1\n"), "{said:#?}");
    let [told] = of(&said, "cpu-bind-stale")[..] else { panic!("{said:#?}") };
    assert!(
        told.contains("SLURM_CPU_BIND=quiet,mask_cpu:") && told.contains("binds the task to 1 CPU on n1"),
        "{told}"
    );
    // Its cure cures.
    let said = inside(&line("unset ${!SLURM_CPU_BIND*}; srun -Q"));
    assert_eq!(said.out, "cpus 2 threads 2\ndone\n", "{said:#?}");
}
