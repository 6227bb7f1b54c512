//! Checkpoints on real files: saved by several ranks (threads), damaged in the ways that
//! people have reported, chosen, read at other world sizes, purged.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use palingenesis_worker::checkpoint::{
    CheckpointError, Checkpoints, Choice, Part, PartMut, Purged, Result, Saved, TrainState, What,
};
use palingenesis_worker::comm::Exchange;
use palingenesis_worker::comm::local::Local;
use palingenesis_worker::config::ResumeFrom;

const PATIENCE: Duration = Duration::from_millis(200);

/// Tensors of a small model: a matrix, one that no world size divides, a vector, a scalar.
const TENSORS: [(&str, &[usize]); 4] = [
    ("model.embed_tokens.weight", &[13, 8]),
    ("model.layers.0.mlp.up_proj.weight", &[7, 5]),
    ("model.norm.weight", &[8]),
    ("scale", &[]),
];

/// Numbers that tell tensor, place and step.
fn number(step: u64, tensor: usize, at: usize) -> f32 {
    step as f32 + tensor as f32 * 0.25 + at as f32 / 1024.0
}

/// What rank `rank` of `world` holds of a tensor.
fn share(shape: &[usize], rank: u32, world: u32) -> Range<usize> {
    let len: usize = shape.iter().product();
    let part = len.div_ceil(world as usize);
    (rank as usize * part).min(len)..((rank as usize + 1) * part).min(len)
}

fn on_all<T: Send>(world: u32, run: impl Fn(&mut Local) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> =
            Local::group(world).into_iter().map(|mut local| scope.spawn(move || run(&mut local))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn checkpoints(output: &Path) -> Checkpoints {
    Checkpoints::new(output, Some("4711"), "n1", PATIENCE)
}

fn state(step: u64) -> TrainState {
    TrainState { step, samples: step * 8, tokens: step * 1024, seed: 1, ..TrainState::default() }
}

fn save_as(checkpoints: &mut Checkpoints, local: &mut Local, step: u64) -> Result<Saved> {
    let (rank, world) = (local.rank(), local.world_size());
    let data: Vec<(usize, Range<usize>, Vec<f32>)> = TENSORS
        .iter()
        .enumerate()
        .map(|(tensor, (_, shape))| {
            let range = share(shape, rank, world);
            (tensor, range.clone(), range.map(|at| number(step, tensor, at)).collect())
        })
        .collect();
    let parts: Vec<Part> = data
        .iter()
        .map(|(tensor, range, data)| Part {
            name: TENSORS[*tensor].0,
            shape: TENSORS[*tensor].1,
            range: range.clone(),
            data,
        })
        .collect();
    let config = serde_json::json!({"train": {"seed": 1, "lr": 3e-4}});
    checkpoints.save(local, What { state: &state(step), config: &config, parts: &parts })
}

/// Saves a step with two ranks.
fn save(output: &Path, step: u64) {
    on_all(2, |local| save_as(&mut checkpoints(output), local, step).unwrap());
}

fn choose_from(output: &Path, from: &ResumeFrom) -> Result<Choice> {
    let mut all = on_all(3, |local| checkpoints(output).choose(local, from, &mut |_| {}));
    let first = all.remove(0);
    for other in all {
        match (&first, other) {
            (Ok(first), Ok(other)) => assert_eq!(*first, other),
            (first, other) => assert_eq!(first.as_ref().unwrap_err().to_string(), other.unwrap_err().to_string()),
        }
    }
    first
}

fn choose(output: &Path) -> Choice {
    choose_from(output, &ResumeFrom::Auto).unwrap()
}

fn chosen(choice: &Choice) -> Option<&str> {
    choice.chosen.as_ref().map(|chosen| chosen.name.as_str())
}

/// Why an entry was skipped.
fn why<'a>(choice: &'a Choice, name: &str) -> &'a str {
    let skipped = choice.skipped.iter().find(|skipped| skipped.name == name);
    skipped.map_or_else(|| panic!("{name} is not among {:?}", choice.skipped), |skipped| skipped.why.as_str())
}

/// Reads the chosen checkpoint with `world` ranks and compares every number.
fn holds(output: &Path, world: u32, step: u64) {
    on_all(world, |local| {
        let mut all = checkpoints(output);
        let chosen = all.choose(local, &ResumeFrom::Auto, &mut |_| {}).unwrap().chosen.unwrap();
        assert_eq!(chosen.step, step);
        let rank = local.rank();
        let mut data: Vec<Vec<f32>> =
            TENSORS.iter().map(|(_, shape)| vec![-1.0; share(shape, rank, world).len()]).collect();
        let mut parts: Vec<PartMut> = TENSORS
            .iter()
            .zip(&mut data)
            .map(|((name, shape), data)| PartMut { name, shape, range: share(shape, rank, world), data })
            .collect();
        all.load(local, &chosen, &mut parts).unwrap();
        for (tensor, (_, shape)) in TENSORS.iter().enumerate() {
            let expected: Vec<f32> = share(shape, rank, world).map(|at| number(step, tensor, at)).collect();
            assert_eq!(data[tensor], expected);
        }
    });
}

fn purge(output: &Path, keep: usize) -> Result<Purged> {
    on_all(2, |local| checkpoints(output).purge(local, keep, &mut |_| {})).remove(0)
}

fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// As a program without manifest leaves it.
fn as_by_torch(step: &Path) {
    fs::remove_file(step.join("manifest.json")).unwrap();
}

fn shard(step: &Path, rank: u32) -> PathBuf {
    step.join(format!("dcp/__{rank}_0.distcp"))
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 4;
    fs::write(path, bytes).unwrap();
}

#[test]
fn what_any_number_of_ranks_saved_any_other_number_reads_bit_for_bit() {
    for saved_by in [1, 3, 4] {
        let output = tempfile::tempdir().unwrap();
        let saved = on_all(saved_by, |local| save_as(&mut checkpoints(output.path()), local, 7).unwrap());
        assert_eq!(saved[0].directory, output.path().join("step-7"));
        assert!(saved.iter().all(|other| other.bytes == saved[0].bytes));
        assert_eq!(names(output.path()), BTreeSet::from(["latest".into(), "step-7".into()]));
        assert_eq!(names(&output.path().join("step-7")), BTreeSet::from(["dcp".into(), "manifest.json".into()]));
        for read_by in [1, 2, 5] {
            holds(output.path(), read_by, 7);
        }
        let choice = choose(output.path());
        let chosen = choice.chosen.unwrap();
        assert_eq!(chosen.state(), Some(&state(7)));
        assert_eq!(chosen.manifest.unwrap().world_size, saved_by);
        assert_eq!(choice.skipped, []);
    }
}

#[test]
fn an_empty_or_missing_output_dir_is_a_beginning() {
    let output = tempfile::tempdir().unwrap();
    assert_eq!(choose(output.path()), Choice { chosen: None, skipped: vec![] });
    assert_eq!(choose(&output.path().join("not/yet")), Choice { chosen: None, skipped: vec![] });
}

/// <https://github.com/awslabs/awsome-distributed-ai/issues/190>
#[test]
fn a_save_that_was_cut_short_is_reported_and_the_one_before_is_taken() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 400);
    save(output.path(), 500);
    let newest = output.path().join("step-500");
    for step in [&output.path().join("step-400"), &newest] {
        as_by_torch(step);
    }
    fs::remove_file(newest.join("dcp/.metadata")).unwrap();
    let choice = choose(output.path());
    assert_eq!(chosen(&choice), Some("step-400"));
    assert!(why(&choice, "step-500").contains(".metadata is missing"), "{:?}", choice.skipped);
    assert!(shard(&newest, 1).exists(), "nothing is deleted");
    holds(output.path(), 2, 400);
}

/// <https://github.com/saforem2/ezpz/pull/196>
#[test]
fn a_marker_of_an_earlier_save_does_not_make_a_mixed_directory_complete() {
    type Change = fn(&Path);
    let cases: [(&str, Change, &str); 4] = [
        ("missing shard", |step| fs::remove_file(shard(step, 1)).unwrap(), "__1_0.distcp is missing"),
        ("empty shard", |step| drop(File::create(shard(step, 1)).unwrap()), "__1_0.distcp is empty"),
        (
            "newer shard",
            |step| {
                let file = File::options().write(true).open(shard(step, 0)).unwrap();
                file.set_modified(SystemTime::now() + Duration::from_secs(60)).unwrap();
            },
            "suspicious: __0_0.distcp was written",
        ),
        (
            "newer shard of a larger world",
            |step| {
                fs::copy(shard(step, 0), shard(step, 2)).unwrap();
                let file = File::options().write(true).open(shard(step, 2)).unwrap();
                file.set_modified(SystemTime::now() + Duration::from_secs(60)).unwrap();
            },
            "suspicious: __2_0.distcp was written",
        ),
    ];
    for (case, change, expected) in cases {
        let output = tempfile::tempdir().unwrap();
        save(output.path(), 200);
        save(output.path(), 300);
        as_by_torch(&output.path().join("step-300"));
        assert_eq!(chosen(&choose(output.path())), Some("step-300"), "{case}");
        change(&output.path().join("step-300"));
        let choice = choose(output.path());
        assert_eq!(chosen(&choice), Some("step-200"), "{case}");
        assert!(why(&choice, "step-300").contains(expected), "{case}: {:?}", choice.skipped);
    }
}

#[test]
fn an_older_shard_of_a_larger_world_is_noted_and_does_no_harm() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 300);
    let step = output.path().join("step-300");
    as_by_torch(&step);
    fs::copy(shard(&step, 0), shard(&step, 2)).unwrap();
    let file = File::options().write(true).open(shard(&step, 2)).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
    let choice = choose(output.path()).chosen.unwrap();
    assert_eq!(choice.name, "step-300");
    assert!(choice.notes[0].contains("__2_0.distcp is not part of it"), "{:?}", choice.notes);
}

/// <https://github.com/TensorAuto/OpenTau/pull/396>
#[test]
fn a_shard_that_went_to_the_run_of_the_next_second_is_found_there() {
    let outputs = tempfile::tempdir().unwrap();
    let (run, next) = (outputs.path().join("10-11-49_run"), outputs.path().join("10-11-50_run"));
    on_all(8, |local| save_as(&mut checkpoints(&run), local, 30).unwrap());
    // Another training, which happens to have a whole step of that number.
    on_all(8, |local| save_as(&mut checkpoints(&outputs.path().join("other_run")), local, 30).unwrap());
    fs::create_dir_all(next.join("step-30/dcp")).unwrap();
    fs::rename(shard(&run.join("step-30"), 3), shard(&next.join("step-30"), 3)).unwrap();
    let error = choose_from(&run, &ResumeFrom::Auto).unwrap_err();
    assert!(matches!(error, CheckpointError::Damaged(_)));
    let text = error.to_string();
    assert!(text.contains("dcp/__3_0.distcp is missing"), "{text}");
    assert!(text.contains("rank 3's shard lies in ../10-11-50_run/step-30"), "{text}");
    assert!(!text.contains("other_run"), "{text}");
}

/// <https://github.com/deepspeedai/DeepSpeed/issues/5405>
#[test]
fn shards_that_stayed_in_a_temporary_directory_are_found_there() {
    let output = tempfile::tempdir().unwrap();
    on_all(4, |local| save_as(&mut checkpoints(output.path()), local, 100).unwrap());
    save(output.path(), 90);
    let (step, temporary) = (output.path().join("step-100"), output.path().join("tmp-step-100"));
    fs::create_dir_all(temporary.join("dcp")).unwrap();
    for rank in [2, 3] {
        fs::rename(shard(&step, rank), shard(&temporary, rank)).unwrap();
    }
    let choice = choose(output.path());
    assert_eq!(chosen(&choice), Some("step-90"));
    let why = why(&choice, "step-100");
    assert!(why.contains("dcp/__2_0.distcp is missing"), "{why}");
    assert!(why.contains("shards of ranks 2, 3 lie in tmp-step-100"), "{why}");
    assert!(shard(&temporary, 3).exists());
}

/// <https://github.com/pytorch/pytorch/pull/92553>
#[test]
fn a_host_that_does_not_see_the_output_dir_is_named() {
    let (shared, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(shared.path(), 1);
    let errors = on_all(4, |local| {
        let (output, host) = if local.rank() < 2 { (shared.path(), "node001") } else { (other.path(), "node002") };
        let error = save_as(&mut Checkpoints::new(output, None, host, PATIENCE), local, 2).unwrap_err();
        assert!(matches!(error, CheckpointError::Storage(_)));
        error.to_string()
    });
    assert!(
        errors[0].contains("made by rank 0 on node001, is not there for all of ranks 2, 3 on node002"),
        "{}",
        errors[0]
    );
    assert!(errors.iter().all(|error| *error == errors[0]));
    assert_eq!(names(shared.path()), BTreeSet::from(["latest".into(), "step-1".into()]));
    assert_eq!(names(other.path()), BTreeSet::new());
}

#[test]
fn a_flipped_bit_in_any_file_is_found_and_the_file_named() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 1);
    save(output.path(), 2);
    let step = output.path().join("step-2");
    for (file, named) in [
        ("dcp/__0_0.distcp", "dcp/__0_0.distcp is damaged"),
        ("dcp/__1_0.distcp", "dcp/__1_0.distcp is damaged"),
        ("dcp/.metadata", "dcp/.metadata is damaged"),
        ("manifest.json", "manifest.json is damaged"),
    ] {
        let path = step.join(file);
        let length = fs::metadata(&path).unwrap().len() as usize;
        for at in [0, length / 3, length - 1 - length / 5] {
            flip(&path, at);
            let choice = choose(output.path());
            assert_eq!(chosen(&choice), Some("step-1"), "{file} at {at}");
            assert!(why(&choice, "step-2").contains(named), "{:?}", choice.skipped);
            flip(&path, at);
        }
    }
    assert_eq!(chosen(&choose(output.path())), Some("step-2"));
}

#[test]
fn a_truncated_or_a_longer_shard_is_found_and_named() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 1);
    save(output.path(), 2);
    let path = shard(&output.path().join("step-2"), 1);
    let length = fs::metadata(&path).unwrap().len();
    for other in [0, length - 1, length + 1] {
        File::options().write(true).open(&path).unwrap().set_len(other).unwrap();
        let choice = choose(output.path());
        assert_eq!(chosen(&choice), Some("step-1"));
        let expected = format!("dcp/__1_0.distcp has {other} bytes instead of {length}");
        assert!(why(&choice, "step-2").starts_with(&expected), "{:?}", choice.skipped);
    }
}

#[test]
fn a_torch_checkpoint_with_a_flipped_bit_is_not_taken() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 1);
    save(output.path(), 2);
    let step = output.path().join("step-2");
    as_by_torch(&step);
    // A number of the first tensor.
    let bytes = fs::read(shard(&step, 0)).unwrap();
    let first = number(2, 0, 0).to_le_bytes();
    let at = bytes.windows(4).position(|four| four == first).unwrap();
    flip(&shard(&step, 0), at);
    let choice = choose(output.path());
    assert_eq!(chosen(&choice), Some("step-1"));
    assert!(why(&choice, "step-2").contains("__0_0.distcp"), "{:?}", choice.skipped);
}

#[test]
fn a_step_is_replaced_by_another_of_its_number_and_counts_until_then() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 5);
    // Between the two renames of a save that was killed there.
    fs::rename(output.path().join("step-5"), output.path().join("step-5.old-4711-1")).unwrap();
    assert_eq!(chosen(&choose(output.path())), Some("step-5.old-4711-1"));
    holds(output.path(), 2, 5);
    save(output.path(), 5);
    assert_eq!(chosen(&choose(output.path())), Some("step-5"));
    save(output.path(), 5);
    assert_eq!(names(output.path()).iter().filter(|name| name.starts_with("step-5.old-")).count(), 2);
    let purged = purge(output.path(), 5).unwrap();
    assert_eq!(purged.kept, ["step-5"]);
    assert_eq!(purged.removed.len(), 2);
    assert_eq!(names(output.path()), BTreeSet::from(["latest".into(), "step-5".into()]));
}

#[test]
fn an_incomplete_step_that_is_trained_again_is_kept_aside_for_people() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 5);
    fs::remove_file(shard(&output.path().join("step-5"), 0)).unwrap();
    save(output.path(), 5);
    holds(output.path(), 1, 5);
    let purged = purge(output.path(), 1).unwrap();
    assert_eq!(purged.kept, ["step-5"]);
    assert_eq!(purged.removed, Vec::<String>::new());
}

#[test]
fn what_only_looks_like_a_step_is_reported_never_followed_and_never_deleted() {
    let (output, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(output.path(), 3);
    save(outside.path(), 9);
    let at = |name: &str| output.path().join(name);
    symlink(outside.path().join("step-9"), at("step-9")).unwrap();
    symlink("/nowhere", at("step-10")).unwrap();
    fs::write(at("step-11"), "a file").unwrap();
    fs::create_dir(at("step-99999999999999999999999")).unwrap();
    fs::create_dir(at("step-007")).unwrap();
    fs::create_dir(at("step-12.tmp-4711-1")).unwrap();
    fs::create_dir(at("step-13")).unwrap();
    fs::create_dir_all(at("step-14/manifest.json")).unwrap();
    save(output.path(), 15);
    fs::remove_dir_all(at("step-15/dcp")).unwrap();
    symlink(outside.path().join("step-9/dcp"), at("step-15/dcp")).unwrap();
    fs::create_dir(at("checkpoint-20")).unwrap();
    fs::rename(at("step-3"), at("step-4")).unwrap();
    save(output.path(), 3);

    let before = names(output.path());
    let choice = choose(output.path());
    assert_eq!(chosen(&choice), Some("step-3"));
    assert_eq!(why(&choice, "step-9"), "it is a symbolic link, and none is followed");
    assert_eq!(why(&choice, "step-10"), "it is a symbolic link, and none is followed");
    assert_eq!(why(&choice, "step-11"), "it is not a directory");
    assert!(why(&choice, "step-99999999999999999999999").contains("too large"));
    assert!(why(&choice, "step-007").contains("zeros"));
    assert!(why(&choice, "step-12.tmp-4711-1").contains("being written"));
    assert_eq!(why(&choice, "step-13"), "manifest.json is missing, and dcp is missing");
    assert!(why(&choice, "step-14").contains("not a regular file"));
    assert_eq!(why(&choice, "step-15"), "dcp is not a directory");
    assert!(why(&choice, "step-4").contains("of step 3"));
    for keep in [1, 5] {
        assert_eq!(purge(output.path(), keep).unwrap().removed, Vec::<String>::new());
    }
    assert_eq!(names(output.path()), before);
    assert_eq!(chosen(&choose(outside.path())), Some("step-9"));
}

#[test]
fn resume_from_takes_a_path_a_number_or_nothing() {
    let (output, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(output.path(), 3);
    save(output.path(), 4);
    save(elsewhere.path(), 9);
    let from = |path: PathBuf| choose_from(output.path(), &ResumeFrom::Path(path));
    assert_eq!(chosen(&from("3".into()).unwrap()), Some("step-3"));
    assert_eq!(chosen(&from(output.path().join("step-4")).unwrap()), Some("step-4"));
    assert_eq!(chosen(&from(elsewhere.path().join("step-9")).unwrap()), Some("step-9"));
    // torchtitan's layout: shards in the step's directory itself.
    as_by_torch(&elsewhere.path().join("step-9"));
    assert_eq!(from(elsewhere.path().join("step-9/dcp")).unwrap().chosen.unwrap().step, 0);

    let missing = from("5".into()).unwrap_err();
    assert!(
        matches!(&missing, CheckpointError::Refused(text) if text.contains("step-5, which is no directory")),
        "{missing}"
    );
    flip(&shard(&output.path().join("step-4"), 1), 200);
    let damaged = from("4".into()).unwrap_err();
    assert!(
        matches!(&damaged, CheckpointError::Damaged(text) if text.contains("dcp/__1_0.distcp is damaged")),
        "{damaged}"
    );
    let never = choose_from(output.path(), &ResumeFrom::Never).unwrap_err();
    assert!(matches!(&never, CheckpointError::Refused(text) if text.contains("has step-4")), "{never}");
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(chosen(&choose_from(empty.path(), &ResumeFrom::Never).unwrap()), None);
}

#[test]
fn nothing_valid_among_several_is_an_error_and_no_silent_beginning() {
    let output = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        save(output.path(), step);
        flip(&shard(&output.path().join(format!("step-{step}")), 0), 300);
    }
    let error = choose_from(output.path(), &ResumeFrom::Auto).unwrap_err().to_string();
    assert!(error.contains("step-2: dcp/__0_0.distcp is damaged") && error.contains("step-1: dcp/"), "{error}");
}

#[test]
fn a_tensor_that_is_missing_or_has_another_shape_is_named_on_all_ranks() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 1);
    for (name, shape) in [("model.layers.1.mlp.up_proj.weight", [7, 5]), ("model.embed_tokens.weight", [14, 8])] {
        let errors = on_all(2, |local| {
            let mut all = checkpoints(output.path());
            let chosen = all.choose(local, &ResumeFrom::Auto, &mut |_| {}).unwrap().chosen.unwrap();
            let mut data = vec![0.0; 4];
            // One rank's is wrong, all must know.
            let mut parts = [PartMut { name, shape: &shape, range: 0..4, data: &mut data }];
            let parts = if local.rank() == 1 { &mut parts[..] } else { &mut [] };
            all.load(local, &chosen, parts).unwrap_err().to_string()
        });
        assert_eq!(errors[0], errors[1]);
        assert!(errors[0].contains(name) && errors[0].contains("rank 1 on n1"), "{}", errors[0]);
    }
}

/// <https://github.com/huggingface/transformers/pull/25136>
#[test]
fn a_purge_never_removes_the_last_valid_one_and_incomplete_ones_do_not_count() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 100);
    save(output.path(), 200);
    fs::remove_file(output.path().join("step-200/dcp/.metadata")).unwrap();
    let purged = purge(output.path(), 1).unwrap();
    assert_eq!(purged.kept, ["step-100"]);
    assert!(purged.removed.is_empty());
    assert!(purged.notes[0].starts_with("step-200: dcp/.metadata is missing"), "{:?}", purged.notes);
    let refused = purge(output.path(), 0).unwrap_err();
    assert!(matches!(&refused, CheckpointError::Refused(text) if text.contains("checkpoint.keep")), "{refused}");
    assert!(output.path().join("step-200").exists());
    save(output.path(), 300);
    assert_eq!(purge(output.path(), 1).unwrap().removed, ["step-100"]);
    holds(output.path(), 2, 300);
}

/// It was told to: train.resume_from = 200.
#[test]
fn what_a_training_that_went_back_saves_is_kept_and_so_is_what_lies_ahead_of_it() {
    let output = tempfile::tempdir().unwrap();
    [100, 200, 300, 400, 500].into_iter().for_each(|step| save(output.path(), step));
    let all = on_all(2, |local| {
        let mut all = checkpoints(output.path());
        let choice = all.choose(local, &ResumeFrom::Path("200".into()), &mut |_| {}).unwrap();
        assert_eq!(choice.chosen.unwrap().step, 200);
        let mut purged = Vec::new();
        for step in [250, 300] {
            save_as(&mut all, local, step).unwrap();
            purged.push(all.purge(local, 3, &mut |_| {}).unwrap());
        }
        purged
    });
    let [first, second] = &all[0][..] else { panic!("{all:?}") };
    assert_eq!(first.kept, ["step-250", "step-200", "step-100"]);
    assert_eq!(first.removed, Vec::<String>::new());
    assert!(first.notes[0].starts_with("step-500; step-400; step-300: later than step-250"), "{:?}", first.notes);
    // The step-300 of before is replaced by another one.
    assert_eq!(second.kept, ["step-300", "step-250", "step-200"]);
    let mut removed = second.removed.clone();
    removed.sort();
    assert_eq!(removed.len(), 2, "{removed:?}");
    assert!(removed[0] == "step-100" && removed[1].starts_with("step-300.old-"), "{removed:?}");
    let left = ["latest", "step-200", "step-250", "step-300", "step-400", "step-500"];
    assert_eq!(names(output.path()), left.map(String::from).into());
}

/// A purge of a scratch file system takes the shards of all ranks; the line is to stay one.
#[test]
fn of_very_many_faults_the_first_are_named_and_the_others_counted() {
    let output = tempfile::tempdir().unwrap();
    on_all(30, |local| save_as(&mut checkpoints(output.path()), local, 1).unwrap());
    save(output.path(), 0);
    let step = output.path().join("step-1");
    (0..30).for_each(|rank| fs::remove_file(shard(&step, rank)).unwrap());
    let choice = choose(output.path());
    assert_eq!(chosen(&choice), Some("step-0"));
    let expected = "dcp/__0_0.distcp is missing; dcp/__1_0.distcp is missing; dcp/__2_0.distcp is missing; \
                    dcp/__3_0.distcp is missing; and 26 more";
    assert!(why(&choice, "step-1").starts_with(expected), "{}", why(&choice, "step-1"));
}

#[test]
fn a_directory_in_which_somebody_keeps_something_else_stays() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 1);
    save(output.path(), 2);
    fs::write(output.path().join("step-1/evaluation.txt"), "mine").unwrap();
    let purged = purge(output.path(), 1).unwrap();
    assert_eq!(purged.removed, Vec::<String>::new());
    assert!(purged.notes[0].contains("it holds evaluation.txt"), "{:?}", purged.notes);
    assert_eq!(purge(output.path(), 2).unwrap().kept, ["step-2", "step-1"]);
}

/// Where a training is over there is no further save that would do it.
#[test]
fn a_start_puts_in_order_what_a_killed_one_has_not_come_to() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 1);
    save(output.path(), 2);
    let all = checkpoints(output.path());
    let choice = choose(output.path());
    // Killed between the rename and the link; before any link; and in an export.
    for link in [Some("step-1"), None] {
        fs::remove_file(output.path().join("latest")).unwrap();
        if let Some(link) = link {
            symlink(link, output.path().join("latest")).unwrap();
        }
        let left = output.path().join("final.tmp-a-1");
        fs::create_dir(&left).unwrap();
        let mark = r#"{"host":"n1","pid":4194305,"began":1,"launch":"a"}"#;
        fs::write(left.join("attempt.json"), mark).unwrap();
        assert_eq!(all.tidy(choice.chosen.as_ref()), Vec::<String>::new());
        assert_eq!(fs::read_link(output.path().join("latest")).unwrap(), Path::new("step-2"));
        assert_eq!(names(output.path()), BTreeSet::from(["latest", "step-1", "step-2"].map(String::from)));
    }
    // What was chosen elsewhere is no latest one here.
    let other = tempfile::tempdir().unwrap();
    save(other.path(), 2);
    let elsewhere = choose_from(output.path(), &ResumeFrom::Path(other.path().join("step-2"))).unwrap();
    fs::remove_file(output.path().join("latest")).unwrap();
    assert_eq!(all.tidy(elsewhere.chosen.as_ref()), Vec::<String>::new());
    assert!(!output.path().join("latest").exists());
}

#[test]
fn what_dead_attempts_left_is_removed_and_nobody_elses() {
    let output = tempfile::tempdir().unwrap();
    save(output.path(), 1);
    let leave = |name: &str, mark: Option<&str>| {
        fs::create_dir_all(output.path().join(name).join("dcp")).unwrap();
        fs::write(output.path().join(name).join("dcp/__0_0.distcp"), "half").unwrap();
        if let Some(mark) = mark {
            fs::write(output.path().join(name).join("attempt.json"), mark).unwrap();
        }
    };
    leave("step-2.tmp-a-1", Some(r#"{"host":"n1","pid":4194303,"began":17,"launch":"a"}"#));
    leave("step-3.tmp-b-1", Some(r#"{"host":"n2","pid":1,"began":17,"launch":"b"}"#));
    leave("step-4.tmp-c-1", None);
    leave("step-5.tmp-d-1", Some("{"));
    leave("backup", Some(r#"{"host":"n1","pid":4194303,"began":17,"launch":"a"}"#));
    // Killed before it was marked: nothing is in it.
    for (name, age) in [("step-6.tmp-e-1", 120), ("step-7.tmp-f-1", 0)] {
        let path = output.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("attempt.json"), "").unwrap();
        for at in [path.join("attempt.json"), path] {
            File::open(at).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        }
    }
    let mut purged = purge(output.path(), 5).unwrap();
    purged.removed.sort();
    assert_eq!(purged.removed, ["step-2.tmp-a-1", "step-6.tmp-e-1"]);
    let left = ["latest", "step-1", "step-3.tmp-b-1", "step-4.tmp-c-1", "step-5.tmp-d-1", "step-7.tmp-f-1", "backup"];
    assert_eq!(names(output.path()), left.map(String::from).into());
    // Of another host, and untouched for long.
    let step = output.path().join("step-3.tmp-b-1");
    for file in ["attempt.json", "dcp/__0_0.distcp", "dcp", "."] {
        let long_ago = SystemTime::now() - Duration::from_secs(7200);
        File::open(step.join(file)).unwrap().set_modified(long_ago).unwrap();
    }
    assert_eq!(purge(output.path(), 5).unwrap().removed, ["step-3.tmp-b-1"]);
}

/// Small and deterministic (<https://prng.di.unimi.it/splitmix64.c>).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.join("dcp")).unwrap();
    for name in ["manifest.json", "dcp/.metadata", "dcp/__0_0.distcp", "dcp/__1_0.distcp"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

#[test]
fn whatever_lies_there_a_purge_leaves_the_newest_valid_ones_and_what_is_incomplete() {
    let made = tempfile::tempdir().unwrap();
    (0..8).for_each(|step| save(made.path(), step));
    for seed in 0..60 {
        let random = &mut Random(seed);
        let output = tempfile::tempdir().unwrap();
        let keep = 1 + random.below(4) as usize;
        let mut valid = Vec::new();
        let mut others = BTreeSet::new();
        // From the newest.
        for step in (0..8).rev() {
            let name = format!("step-{step}");
            let path = output.path().join(&name);
            match random.below(8) {
                0 => continue,
                1 | 2 => {
                    copy(&made.path().join(&name), &path);
                    valid.push(name);
                    continue;
                }
                3 => {
                    copy(&made.path().join(&name), &path);
                    fs::remove_file(shard(&path, random.below(2) as u32)).unwrap();
                }
                4 => {
                    copy(&made.path().join(&name), &path);
                    let file = shard(&path, random.below(2) as u32);
                    flip(&file, random.below(fs::metadata(&file).unwrap().len()) as usize);
                    // Complete, and beyond what is kept: it is not read any more.
                    if valid.len() >= keep {
                        continue;
                    }
                }
                5 => fs::create_dir_all(path.join("dcp")).unwrap(),
                6 => symlink(made.path().join(&name), &path).unwrap(),
                _ => fs::write(&path, "x").unwrap(),
            }
            others.insert(name);
        }
        let purged = purge(output.path(), keep).unwrap();
        valid.truncate(keep);
        let read = others.len() + valid.len() > keep;
        assert!(!read || purged.removed.is_empty() || purged.kept == valid, "seed {seed}: {purged:?}");
        assert!(valid.iter().all(|name| purged.kept.contains(name)), "seed {seed}: {purged:?}");
        others.extend(valid.iter().cloned());
        assert_eq!(names(output.path()), others, "seed {seed}");
        if let Some(newest) = valid.first() {
            assert_eq!(chosen(&choose(output.path())), Some(newest.as_str()), "seed {seed}");
        }
    }
    assert_eq!(names(made.path()).len(), 9, "links were not followed");
}

/// Runs one test of this binary in a process of its own.
fn again(test: &str, output: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("OUTPUT", output).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Only as a process of `a_killed_save_leaves_...`: saves until it is killed.
#[test]
fn process_that_saves() {
    let Some(output) = std::env::var_os("OUTPUT") else { return };
    let output = Path::new(&output);
    on_all(2, |local| {
        let mut all = checkpoints(output);
        let choice = all.choose(local, &ResumeFrom::Auto, &mut |_| {}).unwrap();
        let mut step = choice.chosen.map_or(0, |chosen| chosen.step);
        // A parent that is gone kills nobody.
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end {
            step += 1;
            save_as(&mut all, local, step).unwrap();
            // Now and then the same step again, which is moved aside first.
            if step.is_multiple_of(3) {
                save_as(&mut all, local, step).unwrap();
            }
            all.purge(local, 2, &mut |_| {}).unwrap();
        }
    });
}

#[test]
fn a_killed_save_leaves_the_checkpoints_before_it_valid() {
    let output = tempfile::tempdir().unwrap();
    let random = &mut Random(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos().into());
    let mut last = 0;
    for round in 0..12 {
        let mut process = again("process_that_saves", output.path()).spawn().unwrap();
        thread::sleep(Duration::from_micros(20_000 + random.below(120_000)));
        process.kill().unwrap();
        process.wait().unwrap();
        let choice = choose_from(output.path(), &ResumeFrom::Auto).unwrap();
        let step = choice.chosen.as_ref().map_or(0, |chosen| chosen.step);
        assert!(step >= last, "round {round}: step {step} after {last}: {:?}", choice.skipped);
        assert!(choice.skipped.iter().all(|skipped| skipped.name.contains(".tmp-")), "{:?}", choice.skipped);
        if step > 0 {
            holds(output.path(), 3, step);
        }
        last = step;
    }
    assert!(last > 0, "no save was ever over");
    // What the killed ones left goes with the next purge.
    purge(output.path(), 2).unwrap();
    for name in names(output.path()).iter().filter(|name| name.contains(".tmp-")) {
        // One that was killed before it had marked its directory: nothing else is in it.
        let left = names(&output.path().join(name));
        assert!(left.iter().all(|file| file == "attempt.json"), "{name}: {left:?}");
    }
    let kept = names(output.path()).into_iter().filter(|name| !name.contains(".tmp-") && name != ".latest.new");
    assert!(kept.count() <= 3);
}

/// Only as a process of `a_full_disk_...`: `OUTPUT` is on a file system of 1 MiB.
#[test]
fn process_on_a_small_disk() {
    let Some(output) = std::env::var_os("OUTPUT") else { return };
    let output = Path::new(&output);
    save(output, 1);
    let errors = on_all(2, |local| {
        let large = vec![1.0; 4 << 18];
        // Rank 1's does not fit.
        let range = if local.rank() == 0 { 0..16 } else { 16..1 << 20 };
        let parts = [Part { name: "large", shape: &[1 << 20], data: &large[range.clone()], range }];
        let what = What { state: &state(2), config: &serde_json::Value::Null, parts: &parts };
        Checkpoints::new(output, None, &format!("n{}", local.rank() + 1), PATIENCE)
            .save(local, what)
            .unwrap_err()
            .to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("rank 1 on n2 could not write "), "{}", errors[0]);
    assert!(errors[0].contains("/dcp/__1_0.distcp: no space left on device; free space there"), "{}", errors[0]);
    assert_eq!(names(output), BTreeSet::from(["latest".into(), "step-1".into()]));
    holds(output, 2, 1);
    save(output, 3);
    holds(output, 1, 3);
    fs::write(output.join("passed"), "").unwrap();
    eprintln!("passed");
}

#[test]
fn a_full_disk_is_named_with_rank_host_and_file_and_leaves_the_old_state() {
    let output = tempfile::tempdir().unwrap();
    let test = std::env::current_exe().unwrap();
    // In a mount namespace of its own, so that nothing is left behind.
    let script = "mount -t tmpfs -o size=1m none \"$OUTPUT\" || { echo no-mount >&2; exit 0; }; exec \"$0\" --exact process_on_a_small_disk --nocapture";
    let run = Command::new("unshare").args(["-m", "sh", "-c", script]).arg(test).env("OUTPUT", output.path()).output();
    let text = run.map_or_else(|error| error.to_string(), |run| String::from_utf8_lossy(&run.stderr).into_owned());
    if text.contains("no-mount") || text.contains("unshare") || text.contains("No such file") {
        eprintln!("skipped: no file system of 1 MiB can be mounted here: {}", text.trim());
        return;
    }
    assert!(text.contains("passed"), "{text}");
}
