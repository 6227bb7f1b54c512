//! For each check of the command and the layout a step it must speak of and one
//! it must not.

use super::From;
use super::node_examples::World;
use crate::facts::Step;
use crate::facts::policy::Policy;
use crate::plan::{Severity, Shape, Warning};

const TWO: &str = "n[1-2]";

fn laid_out(tasks: &str) -> World {
    World::new(TWO).with(|world| world.step = Step::described(TWO, tasks, 0, 44, 0).unwrap())
}

/// One task on each node, whose GPUs are `visible`.
fn alone(command: &str, visible: &str) -> World {
    laid_out("1").set("CUDA_VISIBLE_DEVICES", visible).command(command)
}

/// Ranks that see these GPUs of a step with `of` on the node.
fn seen(list: &str, of: &str) -> World {
    World::new(TWO).set("CUDA_VISIBLE_DEVICES", list).set("SLURM_GPUS_ON_NODE", of)
}

/// The only task of its step.
fn lone(command: &str) -> World {
    World::new("n1").with(|world| world.step = Step::described("n1", "1", 0, 44, 0).unwrap()).command(command)
}

fn connections(value: &str, command: &str) -> World {
    World::new(TWO).set("CUDA_DEVICE_MAX_CONNECTIONS", value).command(command).gpus(8, "NVIDIA H100 80GB HBM3")
}

fn lightning() -> World {
    World::new(TWO).command("python train.py --trainer pytorch_lightning")
}

/// As srun was asked, with slurm.conf's word where its own say nothing.
fn srun(kill: bool, no_kill: bool, wait: u32) -> World {
    let policy = Policy { kill: Some(kill), no_kill, wait: Some(wait), labelled: false };
    World::new(TWO).with(|world| world.policy = Some(policy))
}

/// Each check with a bad example (true) and a good one, and what it found there.
pub(super) fn examples() -> Vec<(&'static str, bool, Vec<Warning>)> {
    let agent = |command: &str| laid_out("1").command(command).with(|world| world.shape = Shape::Agent);
    let megatron = "python pretrain_gpt.py --tensor-model-parallel-size 2";
    let table: Vec<(&'static str, bool, World)> = vec![
        ("kill-on-bad-exit", true, srun(false, false, 0)),
        ("kill-on-bad-exit", true, srun(true, true, 0)),
        ("kill-on-bad-exit", true, srun(false, false, 0).with(|world| world.shape = Shape::Agent)),
        ("kill-on-bad-exit", false, srun(true, false, 0)),
        // --wait ends them.
        ("kill-on-bad-exit", false, srun(false, false, 60)),
        ("kill-on-bad-exit", false, srun(false, false, 0).with(|world| world.shape = Shape::Shell)),
        ("kill-on-bad-exit", false, srun(false, false, 0).command("hostname")),
        // kill-on-bad tells of them.
        ("kill-on-bad-exit", false, srun(false, false, 0).set("SLURM_KILL_BAD_EXIT", "0")),
        ("kill-on-bad-exit", false, srun(true, true, 0).set("SLURM_NO_KILL", "1")),
        ("kill-on-bad-exit", false, World::new(TWO)),
        // srun -m cyclic on two nodes.
        ("dist-not-block", true, World::new(TWO).set("SLURM_GTIDS", "0,2,4,6,8,10,12,14")),
        ("dist-not-block", false, World::new(TWO).set("SLURM_GTIDS", "0,1,2,3,4,5,6,7")),
        // -m arbitrary may give a node another block, which stays a block.
        ("dist-not-block", false, World::new(TWO).set("SLURM_GTIDS", "8,9,10,11,12,13,14,15")),
        ("uneven", true, laid_out("8,4")),
        ("uneven", false, laid_out("8(x2)")),
        ("uneven", false, laid_out("1,2").with(|world| world.shape = Shape::Shell)),
        ("one-task-many-gpus", true, alone("python3 train.py", "0,1,2,3,4,5,6,7")),
        ("one-task-many-gpus", true, laid_out("1").gpus(8, "NVIDIA H200")),
        ("one-task-many-gpus", false, alone("python3 train.py", "0")),
        ("one-task-many-gpus", false, alone("python3 train.py", "")),
        ("one-task-many-gpus", false, alone("python3 -m maxtext.train", "0,1,2,3")),
        ("one-task-many-gpus", false, alone("python3 -m vllm.entrypoints.openai.api_server", "0,1,2,3")),
        ("one-task-many-gpus", false, alone("bash run.sh", "0,1,2,3")),
        ("one-task-many-gpus", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "0,1,2,3")),
        ("gpus-per-task", true, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "3")),
        ("gpus-per-task", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")),
        ("gpus-per-task", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "")),
        ("gpus-per-task", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "0").set("JAX_LOCAL_DEVICE_IDS", "0")),
        ("gpus-per-task", false, alone("python3 train.py", "0")),
        ("gpus-fewer", true, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "0,1,2,3")),
        ("gpus-fewer", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")),
        ("gpus-fewer", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "0,1,2,3").with(|w| w.shape = Shape::Shell)),
        ("gpus-per-task", true, seen("0", "8")),
        ("gpus-per-task", true, seen("0,1", "8")),
        ("gpus-per-task", false, seen("0,1,2,3,4,5,6,7", "8")),
        // Two ranks on one GPU that both see, for MPS.
        ("gpus-per-task", false, seen("0", "1")),
        // isolate=env.
        ("gpus-per-task", false, seen("0", "8").with(|world| world.values[0].from = From::Ours)),
        // Hidden by a cgroup alone.
        ("gpus-per-task", true, World::new(TWO).set("SLURM_GPUS_ON_NODE", "8").machine(8, 1)),
        ("gpus-per-task", false, World::new(TWO).set("SLURM_GPUS_ON_NODE", "4").machine(8, 4)),
        ("gpus-fewer", true, World::new(TWO).set("SLURM_GPUS_ON_NODE", "4").machine(8, 4)),
        ("gpus-fewer", true, seen("0", "1")),
        ("gpus-fewer", true, seen("0,1,2,3", "4").machine(8, 8)),
        ("gpus-fewer", false, seen("0,1", "8")),
        ("gpus-fewer", false, World::new(TWO).machine(8, 8)),
        ("gpus-foreign", true, World::new(TWO).set("SLURM_GPUS_ON_NODE", "4").machine(8, 8)),
        ("gpus-foreign", false, World::new(TWO).set("SLURM_GPUS_ON_NODE", "4").machine(8, 4)),
        ("gpus-foreign", false, seen("4,5,6,7", "4").machine(8, 8)),
        ("gpus-foreign", false, World::new(TWO).machine(8, 8)),
        // Slurm's list, and a device file that is not there or not open.
        ("gpus-none", true, seen("0", "8").machine(8, 0)),
        ("gpus-none", true, World::new(TWO).set("SLURM_GPUS_ON_NODE", "8").machine(8, 0)),
        ("gpus-none", true, World::new(TWO).machine(8, 0)),
        ("gpus-none", true, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "8").machine(8, 8)),
        ("gpus-none", true, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "0,0").machine(8, 8)),
        ("gpus-none", true, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "all").machine(8, 8)),
        // Asked for.
        ("gpus-none", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "-1").machine(8, 8)),
        ("gpus-none", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "").machine(8, 8)),
        ("gpus-none", false, World::new(TWO).set("CUDA_VISIBLE_DEVICES", "NoDevFiles").machine(8, 0)),
        ("gpus-none", false, World::new(TWO).machine(8, 8)),
        ("gpus-none", false, World::new(TWO).machine(0, 0)),
        // Where nothing is trained.
        ("gpus-none", false, World::new(TWO).command("hostname").machine(8, 0)),
        ("gpus-none", false, World::new(TWO).with(|world| world.shape = Shape::Shell).machine(8, 0)),
        ("gpus-none", false, lone("python3 preprocess.py").machine(8, 0)),
        ("one-task-many-gpus", false, alone("python3 -c pass", "0,1,2,3")),
        ("deepspeed-five", true, agent("python train.py --deepspeed ds.json")),
        ("deepspeed-five", false, agent("python -m torch.distributed.run train.py --deepspeed ds.json")),
        ("deepspeed-five", false, agent("deepspeed train.py")),
        ("deepspeed-five", false, World::new(TWO).command("python train.py --deepspeed ds.json")),
        ("warm-skipped", true, World::new(TWO).with(|world| world.spec = "warm=x,preflight=off")),
        ("warm-skipped", true, lone("python train.py").with(|world| world.spec = "warm=x,preflight=off")),
        ("warm-skipped", true, lone("bash").with(|world| (world.spec, world.shape) = ("warm=x", Shape::Shell))),
        ("warm-skipped", false, World::new(TWO).with(|world| world.spec = "warm=x,preflight=warn")),
        ("warm-skipped", false, World::new(TWO).with(|world| world.spec = "preflight=off")),
        ("lightning-ntpn", true, lightning()),
        ("lightning-ntpn", false, lightning().set("SLURM_NTASKS_PER_NODE", "8")),
        ("lightning-ntpn", false, lightning().set("SLURM_JOB_NAME", "interactive")),
        ("lightning-ntpn", false, World::new(TWO)),
        ("maxconn-tp", true, connections("8", megatron)),
        ("maxconn-tp", false, connections("1", megatron)),
        ("maxconn-tp", false, connections("8", megatron).gpus(8, "NVIDIA B200")),
        ("maxconn-tp", false, connections("8", "python pretrain_gpt.py --tensor-model-parallel-size=1")),
        ("maxconn-tp", false, connections("8", &format!("{megatron} --use-megatron-fsdp"))),
    ];
    table.into_iter().map(|(id, bad, world)| (id, bad, world.found(id))).collect()
}

#[test]
fn each_check_tells_the_bad_from_the_good() {
    for (id, bad, found) in examples() {
        assert_eq!(!found.is_empty(), bad, "{id}: {found:?}");
    }
}

/// Megatron-LM, megatron/training/arguments.py: an assertion, so certain where
/// the GPUs are known.
#[test]
fn megatron_s_assertion_is_an_error_where_the_gpus_are_known() {
    let megatron = "python pretrain_gpt.py --context-parallel-size=4";
    let known = connections("32", megatron).found("maxconn-tp");
    assert_eq!(known[0].severity, Severity::Error);
    assert!(known[0].message.contains("CUDA_DEVICE_MAX_CONNECTIONS=32 with --context-parallel-size"), "{known:?}");
    let unknown = connections("32", megatron).gpus(0, "").found("maxconn-tp");
    assert_eq!(unknown[0].severity, Severity::Warning);
}

#[test]
fn a_lone_program_is_told_how_many_gpus_stay_idle() {
    let found = alone("/usr/bin/python3.11 train.py", "0,1,2,3,4,5,6,7").found("one-task-many-gpus");
    assert!(found[0].message.contains("one rank on n1 sees 8 GPUs"), "{found:?}");
    assert!(found[0].cure.contains("--ntasks-per-node=8"), "{found:?}");
}

/// <https://github.com/NVIDIA/nccl/issues/1066>, and nccl-tests/issues/300 for
/// the cure.
#[test]
fn hidden_gpus_are_told_with_the_way_out() {
    let found = seen("3", "8").found("gpus-per-task");
    assert_eq!(found[0].severity, Severity::Warning);
    let message = &found[0].message;
    for part in ["8 ranks on n1", "one GPU of the step's 8", "CUDA_VISIBLE_DEVICES=3", "invalid device ordinal"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    for part in ["--gpus-per-node=N --gpu-bind=none", "--tres-bind=gres/gpu:none", "PALINGENESIS_GPU_INDEX"] {
        assert!(found[0].cure.contains(part), "{part}: {}", found[0].cure);
    }
    // Each has as many as there are ranks: its numbers are all there.
    let two = seen("2,3", "4").with(|world| world.step = Step::described(TWO, "2", 0, 44, 0).unwrap());
    let found = two.found("gpus-per-task");
    assert!(found[0].message.contains("sees 2 GPUs of the step's 4"), "{found:?}");
    assert!(!found[0].message.contains("ordinal"), "{found:?}");
}

/// <https://github.com/jax-ml/jax/issues/29669>: more tasks than GPUs may be
/// meant; NCCL takes no GPU twice (NCCL, src/init.cc).
#[test]
fn more_ranks_than_gpus_are_started_with_a_warning() {
    let found = seen("0,1,2,3", "4").machine(4, 4).found("gpus-fewer");
    assert_eq!(found[0].severity, Severity::Warning);
    let message = &found[0].message;
    for part in ["8 ranks on n1 see 4 GPUs", "'Duplicate GPU detected'", "none from LOCAL_RANK 4 on"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn no_gpu_at_all_is_an_error_where_the_task_was_given_some() {
    let severity = |world: World| world.found("gpus-none")[0].severity;
    assert_eq!(severity(seen("0", "8").machine(8, 0)), Severity::Error);
    assert_eq!(severity(World::new(TWO).set("SLURM_GPUS_ON_NODE", "8").machine(8, 0)), Severity::Error);
    assert_eq!(severity(World::new(TWO).set("CUDA_VISIBLE_DEVICES", "9").machine(8, 8)), Severity::Error);
    // Nobody asked for one.
    assert_eq!(severity(World::new(TWO).machine(8, 0)), Severity::Warning);
    let found = seen("0", "8").machine(8, 0).found("gpus-none");
    let message = &found[0].message;
    assert!(message.contains("no GPU of n1, which has 8, where its step has 8"), "{message}");
    assert!(message.contains("8 of its 8 GPUs may not be opened"), "{message}");
}

/// slurm.conf(5), KillOnBadExit, and srun(1), --kill-on-bad-exit: with the default the
/// other processes continue to run.
#[test]
fn what_happens_when_one_rank_fails_is_told_with_the_option_that_changes_it() {
    let found = srun(false, false, 0).found("kill-on-bad-exit");
    assert_eq!(found[0].severity, Severity::Info);
    assert!(found[0].message.contains("one of the 16 ranks fails"), "{found:?}");
    assert!(found[0].cure.contains("add -K (--kill-on-bad-exit)"), "{found:?}");
    let found = srun(false, true, 0).found("kill-on-bad-exit");
    assert!(found.len() == 1 && found[0].message.starts_with("--no-kill: if a node or a rank fails"), "{found:?}");
    let one = World::new("n1").with(|world| {
        world.step = Step::described("n1", "1", 0, 44, 0).unwrap();
        world.policy = Some(Policy { kill: Some(false), wait: Some(0), ..Policy::default() });
    });
    assert!(one.found("kill-on-bad-exit").is_empty());
}
