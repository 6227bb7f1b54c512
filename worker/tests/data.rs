//! Text files to token shards and back, against Hugging Face's own tokenizers
//! (`fixtures/tokenizer/make.py`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Parser;
use palingenesis_worker::data::prepare::{self, PrepareArgs, Summary};
use palingenesis_worker::data::{Batches, Dataset, Order};

/// A directory that goes away.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path = std::env::temp_dir().join(format!("palingenesis-data-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().to_string()).collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    prepare: PrepareArgs,
}

fn run(arguments: &[&str]) -> Result<Summary, String> {
    let line = Line::try_parse_from(std::iter::once(&"prepare").chain(arguments)).map_err(|error| error.to_string())?;
    prepare::run(&line.prepare).map_err(|error| error.to_string())
}

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/tokenizer/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn expected() -> serde_json::Value {
    serde_json::from_slice(&fs::read(fixture("expected.json")).unwrap()).unwrap()
}

fn about(dir: &str) -> serde_json::Value {
    serde_json::from_slice(&fs::read(format!("{dir}/data.json")).unwrap()).unwrap()
}

/// All tokens but the last one, and all but the first one.
fn all(data: &Dataset) -> (Vec<u32>, Vec<u32>) {
    let n = data.tokens() as usize - 1;
    let (mut inputs, mut targets) = (vec![0; n], vec![0; n]);
    data.sample(0, &mut inputs, &mut targets).unwrap();
    (inputs, targets)
}

fn tokens(dir: &str) -> Vec<u32> {
    let (mut inputs, targets) = all(&Dataset::open(Path::new(dir)).unwrap());
    inputs.extend(targets.last());
    inputs
}

/// The file truncates to 16 tokens, which must not cut a training's text
/// (<https://github.com/weaviate/t2v-transformers-models/issues/122>).
#[test]
fn tokens_are_those_of_hugging_face_and_the_file_is_llm_cs() {
    let dir = Dir::new("hf");
    let out = dir.path("out");
    let summary =
        run(&["--out", &out, "--tokenizer", &fixture("tokenizer.json"), "--split", "%", &fixture("text.txt")]);
    let (summary, expected) = (summary.unwrap(), expected());
    let ids: Vec<u32> = serde_json::from_value(expected["ids"].clone()).unwrap();
    assert_eq!(tokens(&out), ids);
    assert_eq!((summary.tokens, summary.documents, summary.shards), (ids.len() as u64, 4, 1));
    assert_eq!(about(&out)["shards"][0]["crc32"], expected["crc32"], "not the bytes that Python writes");
    // The end of text of tokenizer_config.json.
    assert_eq!((summary.vocab, about(&out)["eos"].as_u64()), (600, Some(1)));
    let data = Dataset::open(Path::new(&out)).unwrap();
    data.verify(0, 1).unwrap();
    let copied: Vec<String> = data.tokenizer_files().iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let theirs = ["tokenizer.json", "tokenizer_config.json"].map(|name| fs::read_to_string(fixture(name)).unwrap());
    assert_eq!(copied, theirs);
    let told = summary.to_string();
    assert!(
        told.contains("709 tokens of 4 documents in 1 shard,") || told.contains(" tokens of 4 documents"),
        "{told}"
    );

    // By its directory, with another end, and in small shards.
    let again = dir.path("again");
    let parts = ["--out", &again, "--tokenizer", &fixture(""), "--eos", "<|endoftext|>", "--split", "%"];
    run(&[&parts[..], &["--shard-tokens", "100", &fixture("text.txt")]].concat()).unwrap();
    let other: Vec<u32> = ids.iter().map(|id| if *id == 1 { 0 } else { *id }).collect();
    assert_eq!(tokens(&again), other);
    assert_eq!(about(&again)["shards"].as_array().unwrap().len(), ids.len().div_ceil(100));
}

/// transformers 5.24 takes the class of the model's family where no tokenizer_config.json
/// names one, and that class gives this file other ids; see interop/export.py.
#[test]
fn a_tokenizer_alone_is_told_to_be_what_its_file_says() {
    let dir = Dir::new("bare");
    let (alone, out) = (dir.path("tokenizer.json"), dir.path("out"));
    fs::copy(fixture("tokenizer.json"), &alone).unwrap();
    run(&["--out", &out, "--tokenizer", &alone, &fixture("text.txt")]).unwrap();
    let data = Dataset::open(Path::new(&out)).unwrap();
    let beside = data.tokenizer_files().into_iter().find(|file| file.ends_with("tokenizer_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&fs::read(beside).unwrap()).unwrap();
    assert_eq!(
        (&config["tokenizer_class"], &config["eos_token"]),
        (&"PreTrainedTokenizerFast".into(), &"<|endoftext|>".into())
    );
    assert_eq!(data.eos(), 0);
}

#[test]
fn long_documents_are_whole_and_in_order() {
    let dir = Dir::new("long");
    // More than a round of 8 MiB, in one document and in one line of JSON.
    let long: String = (0..1_300_000).map(|number| format!("{number:06}\n")).collect();
    let json = format!("{}\n", serde_json::json!({ "content": long }));
    let (file, lines) = (dir.file("long.txt", &long), dir.file("long.jsonl", json));
    let out = dir.path("out");
    let summary =
        run(&["--out", &out, "--bytes", "--key", "content", "--shard-tokens", "4000000", &file, &lines]).unwrap();
    assert_eq!((summary.documents, summary.shards), (2, 5));
    let expected = long.bytes().map(u32::from).chain([256]);
    assert!(tokens(&out).into_iter().eq(expected.clone().chain(expected)));
}

#[test]
fn bytes_are_tokens_without_a_tokenizer() {
    let dir = Dir::new("bytes");
    let (a, b, c) = (
        dir.file("a", "h\u{e9}\n%\nx"),
        dir.file("b", b"\xff\0"),
        dir.file("c.jsonl", "{\"text\":\"\\n\"}\n{\"text\":\"j\"}"),
    );
    let out = dir.path("deep/er/out");
    let summary = run(&["--out", &out, "--bytes", &a, &b, &c]).unwrap();
    assert_eq!(tokens(&out), [104, 0xc3, 0xa9, 10, 37, 10, 120, 256, 255, 0, 256, 106, 256]);
    assert_eq!((summary.documents, summary.vocab), (3, 257));
    let sources = about(&out)["sources"].clone();
    assert_eq!((sources[1]["bytes"].as_u64(), sources[2]["documents"].as_u64()), (Some(2), Some(1)));
    assert_eq!(fs::metadata(format!("{out}/tokens-00000.bin")).unwrap().permissions().mode() & 0o777, 0o444);
}

/// What comes out of zcat has no name that ends in .jsonl.
#[test]
fn lines_of_json_are_read_from_the_standard_input_too() {
    let dir = Dir::new("stdin");
    let (lines, upper) = ("{\"content\":\"ab\"}\n\n{\"content\":\"c\"}", "{\"text\":\"d\"}\n");
    let prepare = |out: &str, more: &[&str]| {
        let file = fs::File::open(dir.file("lines", lines)).unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_palingenesis-worker"));
        command.args(["prepare", "--bytes", "--out", out]).args(more).stdin(file);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        tokens(out)
    };
    assert_eq!(prepare(&dir.path("json"), &["--key", "content", "-"]), [97, 98, 256, 99, 256]);
    let text: Vec<u32> = lines.bytes().map(u32::from).chain([256]).collect();
    assert_eq!(prepare(&dir.path("text"), &["-"]), text);
    assert_eq!(prepare(&dir.path("upper"), &[&dir.file("d.JSONL", upper)]), [100, 256]);
}

/// The forms of <https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py>, by hand.
#[test]
fn shards_of_both_widths_are_read_as_one_text() {
    let dir = Dir::new("widths");
    let shard = |magic: i32, version: i32, ids: &[u32], width: usize| {
        let mut bytes = vec![0u8; 1024];
        for (at, number) in [magic, version, ids.len() as i32].into_iter().enumerate() {
            bytes[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes());
        }
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()));
        bytes
    };
    let files =
        [shard(20_240_520, 1, &[1, 2, 65_535], 2), shard(20_240_520, 1, &[], 2), shard(20_240_801, 7, &[70_000, 5], 4)];
    let mut shards = Vec::new();
    for (number, (bytes, tokens)) in files.iter().zip([3, 0, 2]).enumerate() {
        dir.file(&format!("{number}.bin"), bytes);
        let crc = format!("{:08x}", crc32fast::hash(bytes));
        shards.push(serde_json::json!({"file": format!("{number}.bin"), "tokens": tokens, "crc32": crc}));
    }
    let about = serde_json::json!({"format": "palingenesis-tokens", "version": 1, "vocab": 70_001, "eos": 0, "tokens": 5,
        "tokenizer": {"name": "t", "sha256": "", "files": []}, "documents": 1, "shards": shards, "sources": []});
    dir.file("data.json", about.to_string());
    let data = Dataset::open(&dir.0).unwrap();
    data.verify(0, 1).unwrap();
    assert_eq!(all(&data), (vec![1, 2, 65_535, 70_000], vec![2, 65_535, 70_000, 5]));
    // Sequences overlap by one token, and what does not fill one is left out.
    assert_eq!((data.samples(1), data.samples(2), data.samples(3), data.samples(4), data.samples(5)), (4, 2, 1, 1, 0));
    let (mut inputs, mut targets) = ([0; 2], [0; 2]);
    data.sample(1, &mut inputs, &mut targets).unwrap();
    assert_eq!((inputs, targets), ([65_535, 70_000], [70_000, 5]));
    let few = data.enough(5).unwrap_err().to_string();
    assert!(few.contains("has 5 tokens, too few for one sequence of train.seq_len = 5"), "{few}");
}

#[test]
fn damage_is_named_with_its_file() {
    let dir = Dir::new("damage");
    let text = dir.file("text", "abcdefghij".repeat(30));
    let out = dir.path("out");
    run(&["--out", &out, "--bytes", "--shard-tokens", "100", &text]).unwrap();
    let shard = format!("{out}/tokens-00001.bin");
    let good = fs::read(&shard).unwrap();
    let change = |bytes: &[u8]| {
        fs::remove_file(&shard).unwrap();
        fs::write(&shard, bytes).unwrap();
    };
    let open = || Dataset::open(Path::new(&out)).map_err(|error| error.to_string());
    let told = |error: Option<String>, what: &str| {
        let error = error.unwrap_or_default();
        assert!(error.contains("tokens-00001.bin") && error.contains(what) && error.lines().count() == 1, "{error}");
    };

    // A flipped bit is seen by verify, by the rank that has that shard to check.
    let mut flipped = good.clone();
    flipped[1024] ^= 1;
    change(&flipped);
    let data = open().unwrap();
    told(data.verify(0, 1).err().map(|error| error.to_string()), "do not have the checksum of data.json");
    told(data.verify(1, 4).err().map(|error| error.to_string()), "prepare the data again");
    assert!(data.verify(0, 4).is_ok() && data.verify(2, 4).is_ok());
    drop(data);
    // An id that the vocabulary does not have is seen in training, too.
    flipped[1024 + 2 * 7 + 1] = 0xff;
    change(&flipped);
    let (mut inputs, mut targets) = ([0; 10], [0; 10]);
    told(open().unwrap().sample(10, &mut inputs, &mut targets).err().map(|error| error.to_string()), "token 7 has id");
    assert!(open().unwrap().sample(9, &mut inputs, &mut targets).is_ok());

    change(&good[..good.len() - 1]);
    told(open().err(), "1223 bytes long, but 1224 by its header (100 tokens)");
    change(&good[..1000]);
    told(open().err(), "1000 bytes long, less than the header");
    change(&[&[0u8; 4], &good[4..]].concat());
    told(open().err(), "no token shard (it begins with 0, 1)");
    let mut less = good.clone();
    less[8] = 99;
    change(&less[..less.len() - 2]);
    told(open().err(), "99 tokens, but 100 by data.json");
    less[11] = 0x80;
    change(&less);
    told(open().err(), "by its header");
    fs::remove_file(&shard).unwrap();
    told(open().err(), "No such file");
}

#[test]
fn a_description_that_is_none_is_refused() {
    let dir = Dir::new("about");
    let text = dir.file("text", "abc");
    let out = dir.path("out");
    run(&["--out", &out, "--bytes", &text]).unwrap();
    let good = about(&out);
    let file = format!("{out}/data.json");
    let open = || Dataset::open(Path::new(&out)).unwrap_err().to_string();
    let with = |pointer: &str, value: serde_json::Value| {
        let mut changed = good.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        fs::write(&file, changed.to_string()).unwrap();
        open()
    };
    assert!(with("/version", 2.into()).contains("its version is 2, but this worker reads 1"));
    assert!(with("/format", "x".into()).contains("its format is not"));
    assert!(with("/tokens", 5.into()).contains("have 4 tokens together, but 5 are told"));
    assert!(with("/vocab", "x".into()).contains("data.json: invalid type"));
    // Nothing outside of the directory is opened.
    for name in ["../text", "/etc/passwd", "", ".", "..", "a/b", "a/"] {
        assert!(with("/shards/0/file", name.into()).contains("is no name of a file in it"), "{name}");
    }
    assert!(with("/tokenizer/files/0", "../x".into()).contains("is no name of a file in it"));
    fs::write(&file, "{").unwrap();
    assert!(open().contains("data.json: EOF"));
    fs::remove_file(&file).unwrap();
    assert!(open().contains("has no data.json; make it with palingenesis-worker prepare --out"));
    let none = Dataset::open(&dir.0.join("none")).unwrap_err().to_string();
    assert!(none.contains("is no directory; make it with"), "{none}");
}

#[test]
fn what_fails_leaves_nothing_and_nothing_is_overwritten() {
    let dir = Dir::new("fails");
    let good = dir.file("good", "text\n");
    let tokenizer = fixture("tokenizer.json");
    let out = dir.path("out");
    let latin = dir.file("latin", b"one\n%\ntwo\nthr\xe9e\n");
    let blank = dir.file("blank", " \n");
    let broken = dir.file("tokenizer.json", "{}");
    let lines = dir.file("l.jsonl", "{\"text\":\"a\"}\n{\"txt\":\"b\"}\n");
    let packed = dir.file("p.gz", b"\x1f\x8b\x08\0");
    let before = dir.names();
    for (arguments, told) in [
        (vec!["--tokenizer", &tokenizer, &good, &dir.path("missing")], "missing: cannot be opened: No such file"),
        (vec!["--tokenizer", &tokenizer, "--split", "%", &good, &latin], "latin:4: not UTF-8; convert the file"),
        (vec!["--tokenizer", &tokenizer, &blank], "no text in any of the files"),
        (vec!["--tokenizer", &broken, &good], "no tokenizer.json of Hugging Face"),
        (vec!["--tokenizer", &dir.path("none"), &good], "none: cannot be read: No such file"),
        (vec!["--tokenizer", &tokenizer, "--eos", "</s>", &good], "--eos '</s>' is no token of"),
        (vec!["--bytes", &lines], "l.jsonl:2: no key \"text\"; name the text's key with --key, here are: txt"),
        (vec!["--bytes", &packed], "p.gz: is gzip, not text; unpack it"),
        (vec!["--bytes", &dir.path("")], "is a directory; name the files in it"),
        (vec!["--bytes", "--tokenizer", &tokenizer, &good], "cannot be used with"),
        (vec![&good], "--tokenizer"),
        (vec!["--bytes"], "<FILE>"),
        (vec!["--bytes", "--shard-tokens", "0", &good], "0 is not in 1..=2147483647"),
    ] {
        let error = run(&[&["--out", &out][..], &arguments].concat()).unwrap_err();
        assert!(error.contains(told), "{error}");
        assert_eq!(dir.names(), before, "{told}");
    }

    // An empty directory is taken, another one never; nor a file or a dangling link.
    fs::create_dir(&out).unwrap();
    run(&["--out", &out, "--bytes", &good]).unwrap();
    let data = about(&out);
    assert!(run(&["--out", &out, "--bytes", &latin]).unwrap_err().contains("exists already and is never overwritten"));
    assert_eq!(about(&out), data);
    assert!(run(&["--out", &good, "--bytes", &latin]).unwrap_err().contains("exists already"));
    std::os::unix::fs::symlink("nowhere", dir.path("link")).unwrap();
    assert!(run(&["--out", &dir.path("link"), "--bytes", &latin]).unwrap_err().contains("exists already"));

    // What a killed run left is told, and left to people.
    fs::create_dir(dir.path(".new.tmp-1")).unwrap();
    let summary = run(&["--out", &dir.path("new"), "--bytes", &good]).unwrap();
    assert_eq!(summary.left_over, [dir.0.join(".new.tmp-1")]);
    assert!(summary.to_string().ends_with("remove it unless one still runs"));
    assert!(dir.0.join(".new.tmp-1").is_dir());
}

#[test]
fn the_fingerprint_is_of_the_tokens() {
    let dir = Dir::new("fingerprint");
    let (one, two) = (dir.file("one", "abc"), dir.file("two", "abd"));
    let print = |name: &str, file: &str| {
        run(&["--out", &dir.path(name), "--bytes", file]).unwrap();
        Dataset::open(&dir.0.join(name)).unwrap().fingerprint()
    };
    let first = print("a", &one);
    assert_eq!(first, print("b", &dir.file("three", "abc")));
    assert_ne!(first, print("c", &two));
    assert_eq!(first.len(), 64);
}

/// Checkpoints hold a place in this order: it may never change.
#[test]
fn the_order_is_that_of_another_program() {
    for case in expected()["orders"].as_array().unwrap() {
        let order = Order::new(case["seed"].as_u64().unwrap(), case["samples"].as_u64().unwrap(), true);
        let theirs: Vec<u64> = serde_json::from_value(case["at"].clone()).unwrap();
        let ours: Vec<u64> = (0..24).map(|i| order.at(i).1).collect();
        assert_eq!(ours, theirs, "{case}");
    }
}

/// <https://github.com/pytorch/torchtitan/issues/811>: a loader's state for each rank cannot be
/// dealt to another number of ranks; samples come twice, or never.
#[test]
fn a_training_that_changes_its_world_size_sees_each_sample_once() {
    let batches = Batches::new(Order::new(5, 24, true), 6, 2);
    let mut seen = Vec::new();
    for (step, world) in [3, 1, 4, 7].into_iter().enumerate() {
        assert_eq!(batches.samples_seen(step as u64), seen.len() as u64);
        for rank in 0..world {
            for micro_step in 0..batches.micro_steps(world) {
                seen.extend(batches.micro(step as u64, micro_step, rank, world));
            }
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..24).collect::<Vec<_>>());
    assert_eq!(batches.epochs(4), 1.0);
}
