//! Whole trainings as people start them: processes that meet over TCP on this machine,
//! signals, kills and exit codes.

mod common;

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use common::port::free_port;
use common::ranks::{Ended, codes, command, end, spawn, start, start_each, wait_for_start, wait_for_step};
use common::{Place, losses};

#[test]
fn processes_train_and_export() {
    let place = Place::new("processes");
    let ended = end(start(&place, 3, &[]));
    assert_eq!(codes(&ended), [Some(0); 3], "{}", ended[0].said);
    let losses = losses(&place.dir("output"));
    assert!(losses.len() == 30 && losses[29].1 < losses[0].1 - 0.5, "{losses:?}");
    assert!(place.dir("output").join("final/model.safetensors").exists());
    assert!(place.dir("output").join("step-30/dcp/.metadata").exists());
    assert!(!place.dir("output").join("restarts.json").exists());
    // The end is the end: another start has nothing to do.
    let again = end(start(&place, 3, &[]));
    assert_eq!(codes(&again), [Some(0); 3], "{}", again[0].said);
}

#[test]
fn a_killed_rank_is_named_and_the_next_start_goes_on() {
    let place = Place::new("killed");
    let more = ["train.steps=100000", "checkpoint.every=5"];
    let mut ranks = start(&place, 3, &more);
    wait_for_step(&place, 12);
    let killed = ranks.remove(1);
    killed.signal(libc::SIGKILL);
    let since = Instant::now();
    assert_eq!(killed.end().signal, Some(libc::SIGKILL));
    let ended = end(ranks);
    let took = since.elapsed();
    assert_eq!(codes(&ended), [Some(75); 2], "{}{}", ended[0].said, ended[1].said);
    assert!(took < Duration::from_secs(10), "{took:?}");
    for rank in &ended {
        let last = rank.last();
        assert!(last.contains("error: ") && last.contains("rank 1 on "), "{}", rank.said);
    }

    let last = losses(&place.dir("output")).last().unwrap().0;
    let goal = format!("train.steps={}", last + 10);
    let ended = end(start(&place, 2, &[&goal, "checkpoint.every=5"]));
    assert_eq!(codes(&ended), [Some(0); 2], "{}", ended[0].said);
    assert!(ended[0].said.contains("from step-"), "{}", ended[0].said);
}

/// Who computes between two operations looks at no connection. Elsewhere it takes a timeout
/// of half an hour: <https://github.com/NVIDIA/nccl/issues/395>.
#[test]
fn a_rank_that_computes_for_long_ends_soon_after_another_one_is_killed() {
    let place = Place::new("computes");
    // One block's attention takes many seconds, and no memory.
    let more = [
        "train.seq_len=8192",
        "model.shape.max_position_embeddings=8192",
        "model.shape.num_attention_heads=32",
        "train.micro_batch_size=1",
        "train.global_batch_size=3",
    ];
    let mut ranks = start(&place, 3, &more);
    wait_for_start(&place);
    thread::sleep(Duration::from_secs(1));
    let killed = ranks.remove(2);
    let since = Instant::now();
    killed.signal(libc::SIGKILL);
    for rank in end(ranks) {
        let took = rank.when.saturating_duration_since(since);
        assert_eq!(rank.code, Some(75), "{}", rank.said);
        assert!(rank.last().contains("error: ") && rank.last().contains(": rank 2 on "), "{}", rank.said);
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
}

#[test]
fn a_signal_writes_a_checkpoint_and_asks_for_another_start() {
    for (signal, to) in [(libc::SIGUSR1, 1), (libc::SIGTERM, 0)] {
        let place = Place::new(&format!("signal-{signal}"));
        let more = ["train.steps=100000", "checkpoint.every=0"];
        let ranks = start(&place, 2, &more);
        wait_for_step(&place, 3);
        ranks[to].signal(signal);
        let ended = end(ranks);
        assert_eq!(codes(&ended), [Some(75); 2], "{}{}", ended[0].said, ended[1].said);
        let last = losses(&place.dir("output")).last().unwrap().0;
        assert!(place.dir("output").join(format!("step-{last}")).is_dir(), "{}", ended[0].said);
        let goal = format!("train.steps={}", last + 3);
        let ended = end(start(&place, 2, &[&goal]));
        assert_eq!(codes(&ended), [Some(0); 2], "{}", ended[0].said);
        assert!(ended[0].said.contains(&format!("from step-{last}")), "{}", ended[0].said);
    }
}

/// Slurm's KillWait would end a save that cannot be done in time.
#[test]
fn a_save_that_took_too_long_before_is_not_begun_on_a_signal() {
    let place = Place::new("slow-save");
    let (more, file) = (["train.steps=100000", "checkpoint.every=2"], place.dir("output/restarts.json"));
    let ranks = start(&place, 2, &more);
    wait_for_step(&place, 5);
    for mut rank in ranks {
        rank.signal(libc::SIGKILL);
        rank.child.wait().unwrap();
    }
    let mut restarts: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert!(restarts["save_ms"].as_u64().unwrap() > 0, "{restarts}");

    for (save_ms, saves) in [(3_600_000, false), (1, true)] {
        restarts["save_ms"] = save_ms.into();
        fs::write(&file, restarts.to_string()).unwrap();
        fs::remove_file(place.dir("output/metrics.jsonl")).unwrap();
        let ranks = start(&place, 2, &["train.steps=100000", "checkpoint.every=0"]);
        wait_for_step(&place, 1);
        ranks[1].signal(libc::SIGTERM);
        let ended = end(ranks);
        assert_eq!(codes(&ended), [Some(75); 2], "{}{}", ended[0].said, ended[1].said);
        let last = losses(&place.dir("output")).last().unwrap().0;
        assert_eq!(place.dir("output").join(format!("step-{last}")).is_dir(), saves, "{}", ended[0].said);
        let told = ended[0].said.contains("a checkpoint takes 3600.0 s, more than checkpoint.grace = 30 leaves");
        assert_eq!(told, !saves, "{}", ended[0].said);
    }
}

#[test]
fn a_second_signal_ends_at_once() {
    let place = Place::new("second");
    // The step's end is far away.
    let more = ["train.steps=100000", "train.global_batch_size=1000000", "train.seq_len=128"];
    let ranks = start(&place, 1, &more);
    wait_for_start(&place);
    thread::sleep(Duration::from_millis(300));
    ranks[0].signal(libc::SIGTERM);
    thread::sleep(Duration::from_millis(300));
    ranks[0].signal(libc::SIGTERM);
    let ended = end(ranks);
    assert_eq!(codes(&ended), [Some(75)], "{}", ended[0].said);
    assert!(ended[0].said.contains("at once"), "{}", ended[0].said);
}

/// `scontrol suspend` stops all ranks, and not all of them go on at the same moment: what
/// they had waited for before is not over because of that.
#[test]
fn a_suspended_training_goes_on_however_long_its_deadlines_have_passed() {
    let place = Place::new("suspended");
    let ranks = start(&place, 3, &["train.steps=2000", "comm.timeout=2", "comm.silence=3"]);
    wait_for_step(&place, 3);
    ranks.iter().for_each(|rank| rank.signal(libc::SIGSTOP));
    thread::sleep(Duration::from_secs(6));
    for rank in &ranks {
        rank.signal(libc::SIGCONT);
        thread::sleep(Duration::from_millis(400));
    }
    let ended = end(ranks);
    assert_eq!(codes(&ended), [Some(0); 3], "{}{}", ended[0].said, ended[1].said);
    assert_eq!(losses(&place.dir("output")).len(), 2000);
}

#[test]
fn starts_without_progress_are_held() {
    let place = Place::new("held");
    let more = ["train.steps=100000", "checkpoint.max_restarts_without_progress=2"];
    for start_number in 0..4 {
        let ranks = start(&place, 2, &more);
        if start_number == 3 {
            let ended = end(ranks);
            assert_eq!(codes(&ended), [Some(76); 2], "{}{}", ended[0].said, ended[1].said);
            assert!(ended[0].said.contains("restarts.json"), "{}", ended[0].said);
            return;
        }
        wait_for_step(&place, 1);
        fs::remove_file(place.dir("output/metrics.jsonl")).unwrap();
        ranks.iter().for_each(|rank| rank.signal(libc::SIGKILL));
        end(ranks);
    }
}

/// RequeueExit=75 would start it for ever.
#[test]
fn an_export_that_always_fails_is_held() {
    let place = Place::new("export-fails");
    let tokenizer = place.dir("data/tokenizer.json");
    let kept = fs::read(&tokenizer).unwrap();
    fs::remove_file(&tokenizer).unwrap();
    let run = || end(start(&place, 2, &["train.steps=6", "checkpoint.max_restarts_without_progress=1"]));
    for code in [75, 75, 75, 76] {
        let ended = run();
        assert_eq!(codes(&ended), [Some(code); 2], "{}{}", ended[0].said, ended[1].said);
        let word = if code == 75 { "tokenizer.json" } else { "found all 6 steps done and did not export" };
        assert!(ended[0].said.contains(word), "{}", ended[0].said);
    }
    // As the line says: mended, and the count forgotten.
    fs::write(&tokenizer, kept).unwrap();
    fs::remove_file(place.dir("output/restarts.json")).unwrap();
    for _ in 0..3 {
        let ended = run();
        assert_eq!(codes(&ended), [Some(0); 2], "{}", ended[0].said);
    }
}

/// No file of it grows beyond so many bytes.
fn limit_files(command: &mut Command, bytes: u64) {
    // SAFETY: setrlimit reads what is there through the call, and is allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            if libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        });
    }
}

/// By default the kernel ends a process whose file grows beyond ulimit -f, without a word:
/// <https://github.com/nodejs/node/pull/27798>.
#[test]
fn a_limit_of_a_file_s_size_is_an_error_that_names_the_file() {
    let place = Place::new("limit");
    let ended = end(start_each(&place, 2, &[], |rank, command| {
        if rank == 1 {
            // Its recording is longer, too, which ends nothing.
            limit_files(command, 20_000);
        }
    }));
    assert_eq!(codes(&ended), [Some(75); 2], "{}{}", ended[0].said, ended[1].said);
    for rank in &ended {
        assert!(
            rank.last().contains("rank 1 on ")
                && rank.last().contains("/dcp/__1_0.distcp: file too large; raise ulimit -f"),
            "{}",
            rank.said
        );
    }
    assert!(ended[1].said.contains("/recorder/rank-1: "), "{}", ended[1].said);
    let ended = end(start(&place, 2, &[]));
    assert_eq!(codes(&ended), [Some(0); 2], "{}", ended[0].said);

    let mut prepare = Command::new(env!("CARGO_BIN_EXE_palingenesis-worker"));
    prepare.arg("prepare").arg("--bytes").arg("--out").arg(place.dir("other")).arg(place.config());
    limit_files(&mut prepare, 100);
    let output = prepare.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{said}");
    assert!(said.contains("File too large") && said.contains(place.dir("").to_str().unwrap()), "{said}");
}

/// Connections of this process between addresses of IPv6's loopback, and others over TCP.
fn connections(process: u32) -> (usize, usize) {
    let table = |name: &str| fs::read_to_string(format!("/proc/{process}/net/{name}")).unwrap_or_default();
    let own: Vec<String> = fs::read_dir(format!("/proc/{process}/fd"))
        .unwrap()
        .flatten()
        .filter_map(|fd| {
            Some(fs::read_link(fd.path()).ok()?.to_str()?.strip_prefix("socket:[")?.trim_end_matches(']').to_string())
        })
        .collect();
    // Documentation/networking/proc_net_tcp.rst: addresses, state (1: established), inode.
    let count = |name: &str, is: fn(&str) -> bool| {
        let table = table(name);
        let lines = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        lines
            .filter(|words| {
                words[3] == "01" && own.iter().any(|inode| inode == words[9]) && is(words[1]) && is(words[2])
            })
            .count()
    };
    let six = |address: &str| address.starts_with("00000000000000000000000001000000:");
    (
        count("tcp6", six),
        count("tcp", |_| true) + count("tcp6", |address| !address.starts_with("00000000000000000000000001000000:")),
    )
}

/// A store that listens where IPv6 does not lead:
/// <https://github.com/pytorch/pytorch/issues/52040>; an address whose colons are taken for a
/// port: <https://github.com/hpcaitech/ColossalAI/issues/2199>.
#[test]
fn ranks_meet_and_train_over_ipv6() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        eprintln!("skipped: no IPv6 on this machine: {error}");
        return;
    }
    let place = Place::new("ipv6");
    let run = |keyed: bool, steps: &str, output: &str| {
        let port = free_port("::1");
        let rank = |rank: u32| {
            let mut command = command(&place, rank, 3, ("::1", port));
            command
                .arg(format!("train.steps={steps}"))
                .arg(format!("train.output_dir={}", place.dir(output).display()));
            if keyed {
                // Each on a host of its own: all goes over TCP.
                command.env("PALINGENESIS_STORE_KEY", "0123456789abcdef".repeat(4));
                command.env("SLURMD_NODENAME", format!("n{rank}")).env("LOCAL_WORLD_SIZE", "1").env("LOCAL_RANK", "0");
            }
            spawn(command)
        };
        (0..3).map(rank).collect::<Vec<_>>()
    };
    for (keyed, name) in [(true, "hosts"), (false, "host")] {
        let ended = end(run(keyed, "30", name));
        assert_eq!(codes(&ended), [Some(0); 3], "{}{}", ended[0].said, ended[1].said);
        assert_eq!(losses(&place.dir(name)).len(), 30);
    }
    assert_eq!(losses(&place.dir("hosts")), losses(&place.dir("host")));

    // And a rank that is lost there is named.
    let mut ranks = run(true, "100000", "output");
    wait_for_step(&place, 2);
    // To two other ranks and from two, and with rank 0.
    for (rank, process) in ranks.iter().enumerate() {
        let with_rank_0 = if rank == 0 { 2 } else { 1 };
        assert_eq!(connections(process.child.id()), (4 + with_rank_0, 0), "rank {rank}");
    }
    let killed = ranks.remove(2);
    killed.signal(libc::SIGKILL);
    for rank in end(ranks) {
        assert_eq!(rank.code, Some(75), "{}", rank.said);
        assert!(rank.last().contains(": rank 2 on n2 is gone ("), "{}", rank.said);
    }
}

#[test]
fn what_is_wrong_with_the_configuration_is_told_with_78() {
    let place = Place::new("wrong");
    for (more, word) in [
        (vec!["train.stepz=3"], "steps"),
        (vec!["train.seq_len=4096"], "max_position_embeddings"),
        // Bytes and the end of a text: said by data.json, not found by looking at all tokens.
        (vec!["model.shape.vocab_size=100"], "token ids up to 256, the model's vocab_size is 100"),
        (vec!["data.path=/nowhere"], "/nowhere"),
        (vec!["model.shape.model_type=qwen3_moe"], "qwen3_moe"),
    ] {
        let ended = end(start(&place, 1, &more));
        assert_eq!(codes(&ended), [Some(78)], "{more:?}: {}", ended[0].said);
        assert!(ended[0].said.contains(word) && ended[0].said.lines().count() == 1, "{more:?}: {}", ended[0].said);
    }
    assert!(!place.dir("output").exists(), "something was written for a configuration that is refused");
}

/// Another start would find the same, where a full disk may have room again.
#[test]
fn an_output_dir_that_cannot_be_one_is_told_with_78() {
    let place = Place::new("no-directory");
    let file = place.config();
    for output in [file.clone(), file.join("below")] {
        let ended = end(start(&place, 2, &[&format!("train.output_dir={}", output.display())]));
        assert_eq!(codes(&ended), [Some(78); 2], "{}{}", ended[0].said, ended[1].said);
        assert!(ended[0].said.contains("error: rank 0 on ") && ended[0].said.contains("train.output_dir = "));
    }
}

#[test]
fn ranks_with_different_configurations_do_not_train() {
    let place = Place::new("different");
    let ended = end(start_each(&place, 2, &[], |rank, command| {
        command.arg(format!("train.lr={}e-3", rank + 1));
    }));
    assert_eq!(codes(&ended), [Some(78); 2], "{}{}", ended[0].said, ended[1].said);
    for rank in &ended {
        assert!(rank.said.contains("rank 1 on ") && rank.said.contains("train.lr is 0.002 there"), "{}", rank.said);
    }
}

/// A file that is missing on one node, or another there. The others would wait for
/// comm.start_timeout, 300 s.
#[test]
fn a_rank_without_a_configuration_tells_the_others() {
    let place = Place::new("unreadable");
    for alone in [0, 2] {
        let ended = end(start_each(&place, 3, &[], |rank, command| {
            if rank == alone {
                command.arg("train.stepz=3");
            }
        }));
        for (rank, Ended { code, said, .. }) in ended.iter().enumerate() {
            let own = rank as u32 == alone;
            assert!(if own { *code == Some(78) } else { [Some(75), Some(78)].contains(code) }, "{code:?}: {said}");
            let last = said.lines().last().unwrap_or_default();
            assert!(
                last.contains(&format!("rank {alone} on ")) && last.contains("train.steps"),
                "{alone}, {rank}: {said}"
            );
        }
    }
    // The same everywhere: nobody waits for anybody.
    let since = Instant::now();
    let ended = end(start(&place, 3, &["train.stepz=3"]));
    assert_eq!(codes(&ended), [Some(78); 3], "{}{}", ended[0].said, ended[1].said);
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
    assert!(ended.iter().all(|rank| rank.said.lines().count() == 1), "{}{}", ended[0].said, ended[1].said);
}

/// What two nodes see of each other's locks cannot be shown here: all processes have one
/// kernel.
#[test]
fn a_second_training_in_the_same_directory_is_refused_and_the_first_goes_on() {
    let place = Place::new("twice");
    let more = ["train.steps=100000", "checkpoint.every=0"];
    let first = start(&place, 2, &more);
    wait_for_step(&place, 2);
    let second = end(start(&place, 2, &["train.steps=100000", "checkpoint.grace=1"]));
    assert_eq!(codes(&second), [Some(75); 2], "{}{}", second[0].said, second[1].said);
    let holder = format!("process {} on ", first[0].child.id());
    for rank in &second {
        let last = rank.said.lines().last().unwrap_or_default();
        assert!(
            last.contains("another training runs in train.output_dir = ") && last.contains(&holder),
            "{}",
            rank.said
        );
    }
    let now = losses(&place.dir("output")).last().unwrap().0;
    wait_for_step(&place, now + 3);
    // Killed, it leaves the file and no lock: nobody waits.
    for mut rank in first {
        rank.signal(libc::SIGKILL);
        rank.child.wait().unwrap();
    }
    assert!(place.dir("output/lock.json").exists());
    let ended = end(start(&place, 2, &[]));
    assert_eq!(codes(&ended), [Some(0); 2], "{}", ended[0].said);
    assert!(!ended[0].said.contains("another training"), "{}", ended[0].said);
}

/// A job that is started again while its predecessor writes its last checkpoint.
#[test]
fn a_predecessor_that_is_about_to_end_is_waited_for() {
    let place = Place::new("overlap");
    let first = start(&place, 2, &["train.steps=100000", "checkpoint.every=0"]);
    wait_for_step(&place, 2);
    let mut second = start(&place, 1, &["train.steps=100000", "checkpoint.every=0"]);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(second[0].child.try_wait().unwrap().is_none());
    first[0].signal(libc::SIGTERM);
    let ended = end(first);
    assert_eq!(codes(&ended), [Some(75); 2], "{}{}", ended[0].said, ended[1].said);
    let last = losses(&place.dir("output")).last().unwrap().0;
    wait_for_step(&place, last + 1);
    second[0].signal(libc::SIGTERM);
    let ended = end(second);
    assert!(ended[0].said.contains("waiting for another training to end"), "{}", ended[0].said);
    assert!(ended[0].said.contains(&format!("from step-{last}")), "{}", ended[0].said);
}

/// Four ranks on two CPUs were told that they keep the others waiting.
#[test]
fn ranks_that_share_cpus_are_told_so_and_not_that_one_is_slow() {
    let place = Place::new("sharing");
    let cpus = palingenesis::system::affinity::mask().unwrap().len();
    for (threads, shared) in [(cpus, true), (cpus / 2, false)] {
        let threads = format!("train.threads={}", threads.max(1));
        let output = format!("train.output_dir={}", place.dir(&format!("output-{shared}")).display());
        let ended = end(start(&place, 2, &[&threads, &output, "train.steps=6"]));
        assert_eq!(codes(&ended), [Some(0); 2], "{}", ended[0].said);
        let told = ended[0].said.contains("2 of 2 ranks compute with more threads than they have CPUs");
        assert_eq!(told, shared || cpus == 1, "{cpus} CPUs, {threads}: {}", ended[0].said);
    }
}

/// One rank reads the only shard; the others hear of it.
#[test]
fn a_flipped_byte_of_the_data_is_found_before_the_first_step() {
    let place = Place::new("flipped");
    let shard = place.dir("data/tokens-00000.bin");
    let mut bytes = fs::read(&shard).unwrap();
    // 'a' or any other byte becomes another one that the vocabulary has.
    let last = bytes.len() - 100;
    bytes[last] ^= 1;
    fs::remove_file(&shard).unwrap();
    fs::write(&shard, bytes).unwrap();
    let ended = end(start(&place, 2, &[]));
    assert_eq!(codes(&ended), [Some(78), Some(75)], "{}{}", ended[0].said, ended[1].said);
    for rank in &ended {
        let line = rank.said.lines().last().unwrap_or_default();
        assert!(line.contains("rank 0 on ") && line.contains("tokens-00000.bin do not have the checksum"), "{line}");
    }
    assert!(!place.dir("output/metrics.jsonl").exists());
    let mut check = Command::new(env!("CARGO_BIN_EXE_palingenesis-worker"));
    let output = check.arg("check").arg(place.dir("data")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(78) && said.contains("tokens-00000.bin"), "{said}");
}

#[test]
fn a_loss_that_is_not_finite_changes_nothing_and_ends_the_training() {
    let place = Place::new("nan");
    // Weights so large that squares overflow.
    let ended = end(start(&place, 1, &["model.shape.initializer_range=1e30"]));
    assert_eq!(codes(&ended), [Some(1)], "{}", ended[0].said);
    assert!(ended[0].said.contains("times in a row"), "{}", ended[0].said);
}
