//! The checks on a real Slurm: what is wrong with the environment is told once,
//! however many ranks there are; what cannot start is refused before anything is
//! asked for; the settings decide. One machine has no InfiniBand: what a value
//! does there is taken from its reader's source.

mod common;

use common::{Said, Sandbox, library};

/// `EX_CONFIG` of sysexits.h.
const REFUSED: i32 = 78;
const MODES: [&str; 2] = ["optional", "required"];

fn up(name: &str) -> Option<Sandbox> {
    let options = [&["--nodes", "2", "--cores", "4"], &common::FOR_HET_STEPS[..]].concat();
    let sandbox = Sandbox::up(&format!("checks-{name}"), &options)?;
    load(&sandbox, "optional");
    Some(sandbox)
}

fn load(sandbox: &Sandbox, mode: &str) {
    sandbox.plugstack(&[&format!("{mode} {}", library().display())]);
}

/// One line of ours, of this check, with these words.
#[track_caller]
fn one_line(said: &Said, id: &str, words: &[&str]) {
    let ours = said.ours();
    assert_eq!(ours.len(), 1, "{said:#?}");
    assert!(ours[0].contains(id), "{said:#?}");
    for word in words {
        assert!(ours[0].contains(word), "'{word}' is missing: {said:#?}");
    }
}

#[track_caller]
fn silent(said: Said) {
    let said = said.ok();
    assert_eq!(said.ours(), [""; 0], "{said:#?}");
}

/// Seconds written into NCCL_IB_TIMEOUT
/// (<https://github.com/open-thoughts/OpenThoughts-Agent/pull/77>).
#[test]
fn a_wrong_value_is_told_once_and_the_job_runs_with_it() {
    let Some(sandbox) = up("told") else { return };
    let four = "srun -N2 --ntasks-per-node=2 --palingenesis";
    let said = sandbox.run(&format!("NCCL_IB_TIMEOUT=120 {four} sh -c 'echo $NCCL_IB_TIMEOUT'")).ok();
    assert_eq!(said.out, "120\n120\n120\n120\n");
    one_line(
        &said,
        "[ib-timeout-range]",
        &["palingenesis: warning: NCCL_IB_TIMEOUT=120", "22 is two minutes", "write 22"],
    );

    let said = sandbox.run(&format!("NCCL_IB_DISABLE=true {four} true")).ok();
    one_line(
        &said,
        "[nccl-bool-word]",
        &["NCCL_IB_DISABLE=true", "NCCL reads it as 0, so InfiniBand stays on", "write 1"],
    );

    // <https://github.com/llm-d/llm-d-benchmark/pull/1862>: names that nobody reads,
    // each told once with what was meant, and left where they are.
    let typos = "NCCL_EXCLUDE_IB_HCA=mlx5_7 NCCL_SOCKET_IFNAMES=eth0 NCCL_DEBG=INFO";
    let said = sandbox.run(&format!("{typos} {four} sh -c 'env | grep -c -e ^NCCL_E -e ^NCCL_DEBG -e NAMES='")).ok();
    assert_eq!(said.out, "3\n".repeat(4), "{said:#?}");
    assert_eq!(said.ours().len(), 3, "{said:#?}");
    for (name, meant) in [
        ("NCCL_EXCLUDE_IB_HCA", "NCCL_IB_HCA"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBG", "NCCL_DEBUG"),
    ] {
        let told = |line: &&&str| line.contains(name) && line.contains(&format!("write {meant} "));
        assert_eq!(said.ours().iter().filter(told).count(), 1, "{name}: {said:#?}");
    }

    // What srun cannot know rank 0 tells.
    let said = sandbox.run(&format!("NCCL_DEBUG_SUBSYS=NET {four} true")).ok();
    one_line(&said, "[subsys-no-info]", &["NCCL_DEBUG=WARN"]);

    // Of the command, once the step is laid out.
    let said = sandbox.run(&format!("{four} sh -c true TOKEN=hf_$(printf 'a%.0s' {{1..34}})")).ok();
    one_line(&said, "[secrets-argv]", &["argument 3", "Hugging Face"]);
    assert!(!said.err.contains("aaaa"), "{said:#?}");

    let said =
        sandbox.run(&format!("NCCL_IB_TIMEOUT=120 NCCL_TREE_THRESHOLD=0 NCCL_DEBUG_SUBSYS=NET {four} true")).ok();
    assert_eq!(said.ours().len(), 3, "{said:#?}");

    // The whole plan is whole.
    let said = sandbox.run("NCCL_IB_TIMEOUT=120 srun -N1 -n2 --palingenesis=show true").ok();
    assert_eq!(said.err.matches("[ib-timeout-range]").count(), 2, "{said:#?}");

    // A het step asks once for each component.
    let line = "NCCL_IB_TIMEOUT=120 srun -N1 -n1 --palingenesis true : -N1 -n1 --palingenesis true";
    one_line(&sandbox.run(line).ok(), "[ib-timeout-range]", &[]);

    // Nothing of it is left in the tasks; an srun inside one tells what is the
    // user's, not what the outer one set.
    let said = sandbox.run("NCCL_IB_TIMEOUT=120 srun -N1 -n1 --palingenesis env").ok();
    assert!(!said.out.contains("SLURM_PALINGENESIS_"), "{said:#?}");
    let said = sandbox.run("salloc -Q -N2 srun -N2 -n2 --overlap --palingenesis=fsdp true").ok();
    assert_eq!(said.ours(), [""; 0], "{said:#?}");
}

#[test]
fn the_settings_decide_what_becomes_of_a_finding() {
    let Some(sandbox) = up("settings") else { return };
    let timeout =
        |spec: &str, more: &str| sandbox.run(&format!("NCCL_IB_TIMEOUT=120 {more} --palingenesis{spec} /bin/true"));
    let srun = "srun -N2 -n2";
    silent(timeout("=checks=off", srun));
    silent(timeout("=ib-timeout-range=off", srun));
    silent(timeout("", &format!("PALINGENESIS_OPT_IB_TIMEOUT_RANGE=off {srun}")));
    silent(timeout("", &format!("PALINGENESIS_OPT_CHECKS=off {srun}")));
    // What --export keeps from the tasks is nobody's concern.
    silent(timeout("", &format!("{srun} --export=NONE")));
    silent(timeout("", &format!("SLURM_EXPORT_ENV=NONE {srun}")));
    silent(sandbox.run("NCCL_IB_TIMEOUT=120 srun -N2 -n2 true"));
    silent(sandbox.run("NCCL_IB_TIMEOUT=120 srun -N2 -n2 --palingenesis=off true"));
    one_line(&timeout("=checks=warn", srun).ok(), "[ib-timeout-range]", &["warning"]);
    let said = timeout("=ib-timeout-range=error", srun);
    assert_eq!(said.code, REFUSED, "{said:#?}");
    one_line(
        &said,
        "ib-timeout-range=warn would start it all the same",
        &["palingenesis: error: ", "22 is two minutes"],
    );

    let maybe =
        |spec: &str| sandbox.run(&format!("TORCH_NCCL_BLOCKING_WAIT=maybe srun -N2 -n2 --palingenesis={spec} true"));
    one_line(&maybe("checks=warn").ok(), "[c10d-bool]", &["palingenesis: warning: "]);
    one_line(&maybe("c10d-bool=warn").ok(), "[c10d-bool]", &["palingenesis: warning: "]);
    silent(maybe("checks=off"));
    let said = maybe("checks=off,c10d-bool=error");
    assert_eq!(said.code, REFUSED, "{said:#?}");
}

#[test]
fn what_cannot_start_is_refused_before_a_job_exists_and_forewarned_by_sbatch_and_salloc() {
    let Some(sandbox) = up("refused") else { return };
    let next = || sandbox.run("scontrol show config | grep NEXT_JOB_ID").ok().out;
    for mode in MODES {
        load(&sandbox, mode);
        let before = next();
        assert!(before.contains("NEXT_JOB_ID"), "{before}");
        let said = sandbox.run("TORCH_NCCL_BLOCKING_WAIT=maybe srun -N2 --ntasks-per-node=2 --palingenesis echo ran");
        assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "{said:#?}");
        one_line(
            &said,
            "c10d-bool=warn",
            &["palingenesis: error: TORCH_NCCL_BLOCKING_WAIT=maybe", "throws", "write 1 or 0"],
        );
        assert_eq!(next(), before, "{mode}: srun asked for a job");

        let will = "palingenesis: warning: srun in this job will refuse TORCH_NCCL_BLOCKING_WAIT=maybe";
        let said = sandbox.run("TORCH_NCCL_BLOCKING_WAIT=maybe sbatch -o /dev/null --palingenesis --wrap true").ok();
        assert!(said.out.contains("Submitted batch job"), "{said:#?}");
        one_line(&said, "[c10d-bool]", &[will]);
        let said = sandbox.run("TORCH_NCCL_BLOCKING_WAIT=maybe salloc -Q -N1 --palingenesis echo ran").ok();
        assert_eq!(said.out, "ran\n", "{said:#?}");
        one_line(&said, "[c10d-bool]", &[will]);
        // The flag by its variable.
        let said = sandbox.run("PALINGENESIS= NCCL_IB_TIMEOUT=120 salloc -Q -N1 echo ran").ok();
        one_line(&said, "[ib-timeout-range]", &["palingenesis: warning: NCCL_IB_TIMEOUT=120"]);
        // Not theirs to tell: the script does not get it, or the user does not want it.
        for silenced in ["--export=NONE --palingenesis", "--palingenesis=checks=off", "--palingenesis=off"] {
            let line = format!("TORCH_NCCL_BLOCKING_WAIT=maybe sbatch -o /dev/null {silenced} --wrap true");
            silent(sandbox.run(&line));
        }
        let line = "SBATCH_EXPORT=NONE TORCH_NCCL_BLOCKING_WAIT=maybe sbatch -o /dev/null --palingenesis --wrap true";
        silent(sandbox.run(line));

        // The script may change it, and then srun starts.
        let said = sandbox.run(
            "TORCH_NCCL_BLOCKING_WAIT=maybe salloc -Q -N1 --palingenesis bash -c '
                srun -n1 echo ran; echo $?; unset TORCH_NCCL_BLOCKING_WAIT; srun -n1 echo ran'",
        );
        assert_eq!((said.code, said.out.as_str()), (0, "78\nran\n"), "{said:#?}");
        assert_eq!(said.ours().len(), 2, "{said:#?}");
    }

    // What the command decides is known when the step exists; it ends as any other.
    let said = sandbox.run(
        "CUDA_DEVICE_MAX_CONNECTIONS=1 srun -N2 --ntasks-per-node=2 --palingenesis sh -c 'echo ran' pretrain.py --use-torch-fsdp2",
    );
    assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "{said:#?}");
    one_line(&said, "maxconn-fsdp=warn", &["CUDA_DEVICE_MAX_CONNECTIONS=1", "Megatron does not start FSDP"]);
    let said = sandbox.run(
        "for i in {1..100}; do [ -n \"$(squeue -h; sinfo -h -N -o '%T' | grep -v '^idle$')\" ] || exit 0; sleep 0.1; done; exit 1",
    );
    said.ok();
}

/// What the cluster's site file says of checks stands below the user's word, and
/// what it sets is looked at as well, by its name.
#[test]
fn the_site_file_s_word_and_values_count() {
    let Some(sandbox) = up("site") else { return };
    let file = sandbox.dir().join("site.toml");
    sandbox.plugstack(&[&format!("optional {} config={}", library().display(), file.display())]);
    let write = |text: &str| sandbox.run_root(&format!("printf '{text}' >{0}; chmod 644 {0}", file.display())).ok();
    let timeout = |spec: &str| sandbox.run(&format!("NCCL_IB_TIMEOUT=120 srun -N2 -n2 --palingenesis{spec} true"));
    write("checks = \"off\"\n");
    silent(timeout(""));
    one_line(&timeout("=checks=warn").ok(), "[ib-timeout-range]", &[]);
    write("[rules]\nib-timeout-range = \"error\"\n");
    let said = timeout("");
    assert_eq!(said.code, REFUSED, "{said:#?}");
    one_line(&said, "ib-timeout-range=warn", &["palingenesis: error: NCCL_IB_TIMEOUT=120"]);
    one_line(&timeout("=ib-timeout-range=warn").ok(), "[ib-timeout-range]", &[]);
    write("[env]\nNCCL_IB_TIMEOUT = \"120\"\n");
    let said = sandbox.run("srun -N2 -n2 --palingenesis true").ok();
    one_line(&said, "[ib-timeout-range]", &["NCCL_IB_TIMEOUT=120 in the site file", "22 is two minutes"]);
}

/// salloc starts its shell by an srun of its own (slurm.conf(5),
/// LaunchParameters=use_interactive_step): no reason to keep anyone from it.
#[test]
fn salloc_s_shell_starts_and_srun_in_it_refuses() {
    let conf = ["--nodes", "2", "--cores", "4", "--conf", "LaunchParameters=use_interactive_step"];
    let Some(sandbox) = Sandbox::up("checks-shell", &conf) else { return };
    load(&sandbox, "optional");
    let said = sandbox.run(
        "cd; export TORCH_NCCL_BLOCKING_WAIT=maybe
         { sleep 2
           echo 'srun --overlap -n1 echo ran </dev/null 2>told >ran; echo $? >code'
           until [ -s code ]; do sleep 0.1; done
           echo exit; } | script -qec 'salloc -N1 --palingenesis' typed >/dev/null
         grep palingenesis: typed | tr -d '\\r' | sed 's/^/shell: /'; cat code ran told",
    );
    let lines: Vec<&str> = said.out.lines().filter(|line| !line.starts_with("shell: ")).collect();
    assert_eq!(lines.first(), Some(&"78"), "{said:#?}");
    assert!(lines[1].starts_with("palingenesis: error: TORCH_NCCL_BLOCKING_WAIT=maybe"), "{said:#?}");
    let shell: Vec<&str> = said.out.lines().filter(|line| line.starts_with("shell: ")).collect();
    assert!(shell.iter().any(|line| line.contains("srun in this job will refuse")), "{said:#?}");
    assert!(!shell.iter().any(|line| line.contains("palingenesis: error")), "{said:#?}");
}
