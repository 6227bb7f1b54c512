//! What a refusal looks like on a real Slurm: one line that says what is wrong
//! and how to cure it, exit code 78, the user's command not run, nothing left
//! behind. And what must not refuse: `help`, `off`, a repeated option.

mod common;

use common::{Said, Sandbox, library};

/// `EX_CONFIG` of sysexits.h.
const REFUSED: i32 = 78;
const MODES: [&str; 2] = ["optional", "required"];

fn up(name: &str) -> Option<Sandbox> {
    let sandbox = Sandbox::up(&format!("refusals-{name}"), &["--nodes", "2", "--cores", "4"])?;
    load(&sandbox, "optional", "");
    Some(sandbox)
}

fn load(sandbox: &Sandbox, mode: &str, arguments: &str) {
    sandbox.plugstack(&[&format!("{mode} {} {arguments}", library().display())]);
}

/// Within seconds no job is left, and every node is idle.
#[track_caller]
fn nothing_is_left(sandbox: &Sandbox, what: &str) {
    let said = sandbox.run(
        "for i in {1..100}; do
             left=$(squeue -h; sinfo -h -N -o '%N %T' | grep -v ' idle$')
             [ -n \"$left\" ] || exit 0
             sleep 0.1
         done
         echo \"$left\"; exit 1",
    );
    assert_eq!(said.code, 0, "after {what}: {}{}", said.out, said.err);
}

/// One line of ours with all of `parts`, exit code 78, and the command, which
/// would have made the file `ran`, has not run.
#[track_caller]
fn assert_refused(said: &Said, what: &str, parts: &[&str]) {
    let text = format!("{what}: exit code {}\nstdout:\n{}\nstderr:\n{}", said.code, said.out, said.err);
    assert_eq!(said.code, REFUSED, "{text}");
    let ours = said.ours();
    assert_eq!(ours.len(), 1, "{text}");
    assert!(ours[0].starts_with("palingenesis: error: "), "{text}");
    for part in parts {
        assert!(ours[0].contains(part), "'{part}' is missing; {text}");
    }
    assert!(!said.out.contains("COMMAND-RAN"), "{text}");
    assert!(!said.err.contains("panicked") && !said.err.contains("RUST_BACKTRACE"), "{text}");
}

/// Runs `line`, in which `$RUN` is a command that leaves a trace.
fn try_it(sandbox: &Sandbox, line: &str) -> Said {
    let mut said = sandbox.run(&format!(
        "export RUN=$HOME/leave-trace; rm -f $HOME/ran
         [ -x $RUN ] || {{ printf '#!/bin/sh\\ntouch %s/ran\\n' $HOME >$RUN; chmod +x $RUN; }}
         {line}
         code=$?
         [ ! -e $HOME/ran ] || echo COMMAND-RAN
         exit $code"
    ));
    // How srun reports tasks that refused is Slurm's line, not ours.
    said.err = said.err.lines().filter(|line| !line.starts_with("srun: ")).map(|line| format!("{line}\n")).collect();
    said
}

#[test]
fn every_mistake_is_one_line_and_exit_code_78_before_the_command_runs() {
    let Some(sandbox) = up("srun") else { return };
    // (environment, SPEC, what the line says: what is wrong, and the way out)
    let cases: &[(&str, &str, &[&str])] = &[
        ("", "megatorn", &["unknown word 'megatorn'", "did you mean 'megatron'?"]),
        ("", "banana", &["unknown word 'banana'", "--palingenesis=help"]),
        ("", "prot=23456", &["unknown key 'prot'", "did you mean 'port'?"]),
        (
            "",
            "launch=nativ",
            &["bad value 'nativ' for launch", "did you mean 'native'?", "auto|native|agent|shell|worker"],
        ),
        ("", "port=80", &["bad value '80' for port in --palingenesis", "below 1024", "write port=PORT"]),
        ("", "port=70000", &["bad value '70000' for port", "65535"]),
        ("PALINGENESIS_OPT_PORT=0", "", &["bad value '0' for port in PALINGENESIS_OPT_PORT", "port 0 is none"]),
        ("PALINGENESIS_OPT_PROT=23456", "", &["PALINGENESIS_OPT_PROT", "did you mean 'PALINGENESIS_OPT_PORT'?"]),
        ("MASTER_PORT=29500a", "", &["MASTER_PORT=29500a", "not a port number", "unset MASTER_PORT"]),
        ("MASTER_PORT=80", "", &["MASTER_PORT=80", "below 1024", "unset MASTER_PORT"]),
        ("", "master=no-such-host", &["no-such-host does not resolve on ", "leave out master="]),
        ("MASTER_ADDR=no-such-host", "", &["MASTER_ADDR=no-such-host does not resolve on ", "unset MASTER_ADDR"]),
        ("MASTER_ADDR=127.0.0.1", "", &["MASTER_ADDR=127.0.0.1 is a loopback address", "2 nodes", "unset MASTER_ADDR"]),
        ("MASTER_ADDR=localhost", "", &["loopback", "2 nodes"]),
        ("", "master=::1", &["loopback", "leave out master="]),
        ("MASTER_ADDR=n2", "", &["MASTER_ADDR=n2 is not rank 0's host", "rank 0 runs on n1", "unset MASTER_ADDR"]),
        ("", "master=n2", &["n2 is not rank 0's host", "rank 0 runs on n1", "leave out master="]),
        ("PALINGENESIS=megatorn", "-", &["unknown word 'megatorn' in PALINGENESIS", "did you mean 'megatron'?"]),
        ("PALINGENESIS=port=1", "-", &["bad value '1' for port in PALINGENESIS"]),
    ];
    for mode in MODES {
        load(&sandbox, mode, "");
        for (environment, spec, parts) in cases {
            let option = match *spec {
                "-" => String::new(),
                "" => "--palingenesis".into(),
                spec => format!("--palingenesis={spec}"),
            };
            let line = format!("{environment} srun -N2 -n2 {option} $RUN");
            assert_refused(&try_it(&sandbox, &line), &format!("{mode}: {line}"), parts);
        }
        nothing_is_left(&sandbox, mode);

        // The admin's line is wrong: the user's job says so, only with the flag.
        load(&sandbox, mode, "gaet=5");
        let line = "srun -N2 -n2 --palingenesis $RUN";
        let parts = ["unknown argument 'gaet=5'", "plugstack.conf", "did you mean 'gate='?"];
        assert_refused(&try_it(&sandbox, line), &format!("{mode}: gaet=5"), &parts);
        let said = try_it(&sandbox, "srun -N2 -n2 $RUN").ok();
        assert!(said.out.contains("COMMAND-RAN") && said.err.is_empty(), "{said:?}");
        let said = try_it(&sandbox, "srun -N2 -n2 --palingenesis=off $RUN").ok();
        assert!(said.out.contains("COMMAND-RAN") && said.err.is_empty(), "{said:?}");
        nothing_is_left(&sandbox, mode);
    }
}

#[test]
fn a_loopback_master_is_right_on_one_node() {
    let Some(sandbox) = up("loopback") else { return };
    let said = sandbox.run("MASTER_ADDR=127.0.0.1 srun -N1 -n2 --palingenesis sh -c 'echo $MASTER_ADDR'").ok();
    assert_eq!((said.out.as_str(), said.err.as_str()), ("127.0.0.1\n127.0.0.1\n", ""));
}

#[test]
fn what_only_a_node_can_know_refuses_there_with_one_line_per_node() {
    let Some(sandbox) = up("nodes") else { return };
    for mode in MODES {
        load(&sandbox, mode, "");
        let said = try_it(&sandbox, "srun -N2 -n4 --ntasks-per-node=2 --palingenesis=iface=nosuch0 $RUN");
        assert_eq!(said.code, REFUSED, "{said:?}");
        assert!(!said.out.contains("COMMAND-RAN"), "{said:?}");
        let mut ours = said.ours();
        ours.sort_unstable();
        assert_eq!(ours.len(), 2, "{said:?}");
        for (line, node) in ours.iter().zip(["n1", "n2"]) {
            assert!(line.contains(&format!("iface=nosuch0: {node} has no such interface")), "{line}");
        }
        nothing_is_left(&sandbox, mode);
    }
}

#[test]
fn sbatch_and_salloc_refuse_a_bad_option_before_anything_is_submitted() {
    let Some(sandbox) = up("sbatch") else { return };
    for mode in MODES {
        load(&sandbox, mode, "");
        let cases = [
            "sbatch -N2 --palingenesis=prot=1 $RUN",
            "printf '#!/bin/sh\\n#SBATCH --palingenesis=prot=1\\n$RUN\\n' | sbatch",
            "salloc -N2 --palingenesis=prot=1 $RUN",
        ];
        for line in cases {
            let said = try_it(&sandbox, line);
            assert_refused(&said, &format!("{mode}: {line}"), &["unknown key 'prot'", "did you mean 'port'?"]);
            let text = format!("{}{}", said.out, said.err);
            assert!(!text.contains("Submitted") && !text.contains("Granted"), "{mode}: {line}: {text}");
        }
        let said = sandbox.run("squeue -h").ok();
        assert_eq!(said.out, "");
    }
}

#[test]
fn what_the_script_may_still_change_is_a_warning_in_sbatch_and_salloc() {
    let Some(sandbox) = up("warns") else { return };
    for mode in MODES {
        load(&sandbox, mode, "");
        let said = try_it(&sandbox, "PALINGENESIS=megatorn sbatch -o /dev/null $RUN").ok();
        assert!(said.out.contains("Submitted batch job"), "{said:?}");
        let ours = said.ours();
        assert_eq!(ours.len(), 1, "{said:?}");
        assert!(ours[0].starts_with("palingenesis: warning: srun in this job will refuse: "), "{said:?}");
        let said = try_it(&sandbox, "PALINGENESIS= sbatch -o /dev/null --palingenesis-cache=relative $RUN").ok();
        assert!(said.ours().len() == 1 && said.err.contains("will refuse: bad value 'relative' for cache"), "{said:?}");
        let said = try_it(&sandbox, "PALINGENESIS=megatorn salloc -Q -N1 $RUN").ok();
        assert!(said.out.contains("COMMAND-RAN"), "{said:?}");
        assert_eq!(said.ours().len(), 1, "{said:?}");
        // MASTER_ADDR and the key variables may still change too: not a word.
        let said = try_it(&sandbox, "MASTER_PORT=80 PALINGENESIS_OPT_PROT=1 salloc -Q -N1 --palingenesis $RUN").ok();
        assert!(said.out.contains("COMMAND-RAN") && said.err.is_empty(), "{said:?}");
        nothing_is_left(&sandbox, mode);
    }
}

#[test]
fn an_srun_inside_a_job_refuses_and_leaves_the_job_alone() {
    let Some(sandbox) = up("inside") else { return };
    let line = "salloc -Q -N2 --palingenesis bash -c '
        srun -N2 -n2 --palingenesis=megatorn $RUN; echo first $?
        MASTER_PORT=80 srun -N2 -n2 $RUN; echo second $?
        srun -N2 -n2 sh -c \"echo rank \\$RANK\" | sort'";
    let said = try_it(&sandbox, line).ok();
    assert_eq!(said.out, "first 78\nsecond 78\nrank 0\nrank 1\n", "{said:?}");
    assert_eq!(said.ours().len(), 2, "{said:?}");
    nothing_is_left(&sandbox, "salloc");
}

#[test]
fn help_is_printed_without_a_job_and_srun_lists_the_option() {
    let Some(sandbox) = up("help") else { return };
    for mode in MODES {
        load(&sandbox, mode, "");
        for command in ["srun -N2", "sbatch -N2", "salloc -N2"] {
            let said = try_it(&sandbox, &format!("{command} --palingenesis=help $RUN")).ok();
            assert!(said.out.starts_with("--palingenesis[=SPEC] gives each task"), "{command}: {said:?}");
            for word in ["off", "show", "port=PORT", "master=HOST", "PALINGENESIS_OPT_<KEY>"] {
                assert!(said.out.contains(word), "{command}: {word}");
            }
            assert!(said.err.is_empty() && !said.out.contains("COMMAND-RAN"), "{command}: {said:?}");
        }
    }
    assert_eq!(sandbox.run("squeue -h").ok().out, "");
    // Slurm breaks the line before a long option's text.
    for command in ["srun", "sbatch", "salloc"] {
        let said = sandbox.run(&format!("COLUMNS=200 {command} --help")).ok();
        let section = said.out.split("Options provided by plugins:").nth(1).unwrap_or_default();
        assert!(section.contains("--palingenesis=[SPEC]"), "{command}: {section}");
        assert!(section.contains("SPEC=help lists what there is"), "{command}: {section}");
    }
}

/// The option may be used several times and come from the job around srun; the
/// last one alone counts (<https://github.com/NERSC/shifter/pull/190>: repeated
/// use was processed twice and failed).
#[test]
fn the_option_s_last_use_wins_and_repeating_it_changes_nothing() {
    let Some(sandbox) = up("repeat") else { return };
    // Slurm's own variables and the launch's name differ from step to step, others of ours
    // must not. (While an
    // earlier job completes, Slurm would take the other node.)
    let show = r#"sh -c 'env | grep -E "^(RANK|LOCAL_|WORLD_|GROUP_|NODE_|MASTER_|NCCL_|CUDA_|TORCH_|PALINGENESIS_)" \
                  | sed "/^PALINGENESIS_LAUNCH_ID=/d; s/^PALINGENESIS_SET=[^ ]*/PALINGENESIS_SET=/
                         s/ PALINGENESIS_LAUNCH_ID=[^ ]*//" | sort'"#;
    let step = |environment: &str, options: &str| {
        let said = sandbox.run(&format!("{environment} srun -w n1 -N1 -n1 {options} {show}")).ok();
        assert_eq!(said.err, "", "{environment} srun {options}");
        said.out
    };
    let once = step("", "--palingenesis=port=23456");
    assert!(once.contains("MASTER_PORT=23456\n") && once.contains("RANK=0\n"), "{once}");
    let last = "--palingenesis=port=23456";
    for options in [
        format!("{last} {last}"),
        format!("{last} {last} {last}"),
        format!("--palingenesis=port=24000,fsdp {last}"),
        // A mistake that a later use replaces is nobody's concern.
        format!("--palingenesis=megatorn --palingenesis {last}"),
        format!("--palingenesis=off {last}"),
    ] {
        assert_eq!(step("", &options), once, "{options}");
    }
    assert_eq!(step("PALINGENESIS=port=24000,fsdp", last), once);
    let bare = step("", "--palingenesis=port=23456 --palingenesis");
    assert!(bare.contains("RANK=0\n") && !bare.contains("23456"), "{bare}");
    let off = step("", &format!("{last} --palingenesis=off"));
    assert!(!off.contains("RANK="), "{off}");

    // The same under salloc, which hands its option to every srun inside.
    let inside = |outer: &str, inner: &str| {
        let script = format!("salloc -Q -N1 {outer} bash -c \"srun -N1 -n1 {inner} $SHOW\"");
        let said = sandbox.run(&format!("export SHOW=$HOME/show; printf '%s\\n' '#!/bin/sh' \"$(cat <<'X'\n{show}\nX\n)\" >$SHOW; chmod +x $SHOW; {script}")).ok();
        assert_eq!(said.err, "", "{script}");
        said.out
    };
    assert_eq!(inside(last, ""), once);
    assert_eq!(inside(last, last), once);
    assert_eq!(inside("--palingenesis=port=24000,fsdp", last), once);
    assert_eq!(inside(&format!("{last} {last}"), &format!("{last} {last}")), once);
    assert_eq!(inside("--palingenesis", last), once);
    assert!(inside("--palingenesis", "").contains("RANK=0\n"), "no argument reaches the inner srun as (null)");
    assert!(!inside(last, "--palingenesis=off").contains("RANK="));

    // And under sbatch, whose script itself is no rank. A step that has to wait for the end of
    // the one before says so, without -Q.
    let said = sandbox.run(&format!(
        "cd; printf '%s\\n' '#!/bin/sh' 'echo \"script:$RANK\"' 'srun -Q -N1 -n1 ./show' 'srun -Q -N1 -n1 {last} ./show' >job
         sbatch -Q -o out --palingenesis=port=24001 job >/dev/null || exit
         for i in {{1..200}}; do [ -n \"$(squeue -h)\" ] || break; sleep 0.1; done
         cat out"
    ));
    let out = said.ok().out;
    let first = once.replace("23456", "24001");
    let outcome = out.strip_prefix("script:\n").unwrap_or_else(|| panic!("{out}"));
    // The hash in the mark is of the port, which differs.
    let unmarked =
        |text: &str| text.lines().filter(|l| !l.starts_with("PALINGENESIS_SET")).map(String::from).collect::<Vec<_>>();
    let both = [unmarked(&first), unmarked(&once)].concat();
    assert_eq!(unmarked(outcome), both);
}

#[test]
fn no_secret_is_printed() {
    let Some(sandbox) = up("secrets") else { return };
    let secrets = "HF_TOKEN=s3cr3t-a WANDB_API_KEY=s3cr3t-b AWS_SECRET_ACCESS_KEY=s3cr3t-c AWS_PROFILE=s3cr3t-d \
                   DB_PASSWORD=s3cr3t-e HUGGING_FACE_HUB_TOKEN=s3cr3t-f MASTER_TOKEN=s3cr3t-g NCCL_KEY=s3cr3t-h";
    let said = sandbox.run(&format!("{secrets} srun -N2 -n2 --palingenesis=show true")).ok();
    assert!(said.err.contains("WORLD_SIZE") && said.err.contains("NCCL_DEBUG"), "{}", said.err);
    assert!(!said.err.contains("s3cr3t"), "{}", said.err);
    let said = sandbox.run(&format!("{secrets} PALINGENESIS_OPT_API_KEY=s3cr3t-i srun -N1 --palingenesis true"));
    assert_refused(&said, "a secret in an unknown variable", &["PALINGENESIS_OPT_API_KEY"]);
    assert!(!said.err.contains("s3cr3t"), "{}", said.err);
    let logs = sandbox.run_root(&format!("grep -rl s3cr3t {}/log; true", sandbox.dir().display())).ok();
    assert_eq!(logs.out, "");
}

/// A user's environment may hold anything: long values, bytes that are no text,
/// names with escapes, our own variables made up. Ranks start, lines stay lines.
#[test]
fn a_hostile_environment_starts_its_ranks_and_moves_no_cursor() {
    let Some(sandbox) = up("hostile") else { return };
    let made_up = "SLURM_PALINGENESIS_REFUSAL=no SLURM_PALINGENESIS_SPEC=launch=shell SLURM_PALINGENESIS_HOST=x \
                   SLURM_PALINGENESIS_CONTAINER=y SLURM_PALINGENESIS_TOLD=0 PALINGENESIS_SITE=/dev/zero PALINGENESIS_STORE_KEY=k \
                   PALINGENESIS_SPEC=port=1 PALINGENESIS_WORKER_ARG=z PALINGENESIS_SET=\"$(printf '9.9 RANK=0\\n\\033[2J=1')\"";
    let odd = "\"$(printf 'NCCL_\\033[2J')=1\" \"NCCL_IB_\"$'\\xff'=1 HF_HOME=$'/caf\\xe9' NCCL_DEBUG_FILE=$'/x\\ny\\033[2J' \
               NCCL_ALGO=$(seq -s, 15000) PYTORCH_ALLOC_CONF=$(head -c 100000 /dev/zero | tr '\\0' ,) \
               NCCL_CONF_FILE=$'/tmp/\\033[2J' MY_TOKEN=hf_secret NCCL_X_KEY=hf_secret FI_EFA_TOKEN=hf_secret";
    for options in ["", "=show", "=debug,show"] {
        let line = format!(
            "env {made_up} {odd} srun -Q -N2 -n2 --palingenesis{options} sh -c \
             'echo rank $RANK $HF_HOME. ${{PALINGENESIS_STORE_KEY-none}}' | sort"
        );
        let said = sandbox.run(&line);
        assert_eq!(said.code, 0, "{options}: {}", said.err.chars().take(4000).collect::<String>());
        assert!(said.out.starts_with("rank 0 /caf") && said.out.contains("rank 1 /caf"), "{options}: {said:?}");
        // A key of another launch, or one that somebody made up, is no rank's.
        assert!(said.out.lines().all(|line| line.ends_with(". none")), "{options}: {said:?}");
        let odd = said.err.chars().find(|c| c.is_control() && *c != '\n');
        assert!(odd.is_none() && !said.err.contains("hf_secret"), "{options}: {odd:?} {}", said.err);
        let longest = said.err.lines().map(str::len).max().unwrap_or(0);
        assert!(longest < 8192, "{options}: a line of {longest} bytes");
        assert!(said.err.lines().all(|line| !line.starts_with("[2J")), "{options}: {}", said.err);
    }
    // Together too long to be handed over: said, not lost.
    let long = "/$(printf 'a %.0s' {1..500})";
    let line = format!(
        "PALINGENESIS_OPT_LOCAL=\"$(echo \"{long}\" | sed 's/ /%20/g')\" srun -N2 --palingenesis-cache=\"{long}\" --palingenesis $RUN"
    );
    assert_refused(&try_it(&sandbox, &line), "too long", &["PALINGENESIS_OPT_*", "more than 2048"]);
}

/// Where srun's host lacks the plugin, or somebody has an srun of his own, the nodes find
/// what the user made up in place of what ours would hand over. It is the user's own word
/// and no more: read as the user, one line each, and no node is worse off.
#[test]
fn what_is_made_up_in_place_of_srun_s_words_is_the_user_s_own_word() {
    let arguments = ["--nodes", "2", "--cores", "4", "--namespace-per-node"];
    let Some(sandbox) = Sandbox::up("refusals-made-up", &arguments) else { return };
    load(&sandbox, "required", "");
    sandbox.run_as(&["--as-root"], "mount --bind /dev/null /etc/slurm/plugstack.conf", 20).ok();
    assert!(!sandbox.run("srun --help").ok().out.contains("--palingenesis"), "srun has the plugin");
    let step = |made_up: &str, then: &str| {
        let words = made_up.split(' ').map(|word| format!("SLURM_PALINGENESIS_{word}")).collect::<Vec<_>>().join(" ");
        let said = sandbox.run(&format!(
            "env {words} srun -Q -N2 -n2 sh -c 'echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR, left: \
             $(env | grep -c ^SLURM_PALINGENESIS_); {then}' >$HOME/out; code=$?; sort $HOME/out; exit $code"
        ));
        let odd = said.err.chars().find(|c| c.is_control() && *c != '\n');
        assert!(odd.is_none() && !said.err.contains("internal fault"), "{made_up}: {odd:?} {said:?}");
        said
    };
    let ranks = "rank 0 of 2 at n1, left: 0\nrank 1 of 2 at n1, left: 0\n";
    let said = step("SPEC=preflight=off", "true").ok();
    assert_eq!((said.out.as_str(), said.err.as_str()), (ranks, ""));

    let said = step("SPEC=$'no\\n\\e[2Jsense'", "true");
    assert_eq!((said.code, said.out.as_str(), said.ours().len()), (REFUSED, "", 2), "{said:?}");
    assert!(said.ours().iter().all(|line| line.contains("unknown word 'no??[2Jsense'")), "{said:?}");
    let said = step("REFUSAL=$'\\e[2Jmine\\nsecond'", "true");
    assert_eq!((said.code, said.out.as_str()), (REFUSED, ""), "{said:?}");
    assert!(said.err.lines().any(|line| line == "?[2Jmine?second"), "{said:?}");
    let numbers = "LAUNCHED=99999999999999999999999 TOLD=zz,-1 CPU_BIND=$'\\e' CONTAINER=$'\\e,'";
    let said = step(&format!("SPEC=preflight=off HOST=$'x\\e[2J' ADDRESS=none MARKS=$'\\e[2J' {numbers}"), "true");
    assert_eq!(said.code, REFUSED, "{said:?}");

    // No secret, and no address: the nodes do not meet, and nobody is connected to.
    for words in ["SPEC=on", "SPEC=on NONCE=00 EXITS=example.org:1", "SPEC=on NONCE=$'\\e' EXITS=[::]:1"] {
        let said = step(words, "true").ok();
        assert_eq!((said.out.as_str(), said.ours().len()), (ranks, 1), "{words}: {said:?}");
        assert!(said.err.contains("warning: srun handed over no secret"), "{words}: {said:?}");
    }
    // A record goes where the user says, from a process of the user's.
    let said = step(&format!("SPEC=preflight=off NONCE={} EXITS=10.99.0.254:1", "07".repeat(32)), "exit 3");
    assert_eq!((said.code, said.out.as_str(), said.ours().len()), (3, ranks, 2), "{said:?}");
    assert!(said.ours().iter().all(|line| line.contains("could not be told at 10.99.0.254:1")), "{said:?}");
    nothing_is_left(&sandbox, "made-up words");
}
