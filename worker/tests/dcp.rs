//! PyTorch's distributed checkpoint: written, read at other world sizes, and damaged in every
//! way. That PyTorch itself reads ours is shown by tests/interop/dcp.py.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use palingenesis_worker::checkpoint::dcp::{self, Dcp, DcpError, Fault, Shard, verify};
use palingenesis_worker::checkpoint::{Part, PartMut};
use serde_json::json;

#[path = "interop/torch_checkpoint.rs"]
mod torch_checkpoint;

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("palingenesis-dcp-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn copy(name: &str, from: &Path) -> Dir {
        let dir = Dir::new(name);
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), dir.0.join(entry.file_name())).unwrap();
        }
        dir
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/torch_dcp")
}

const TENSORS: [(&str, &[usize]); 5] = [
    ("model.a.weight", &[13, 7]),
    ("model.b", &[3, 5, 7]),
    ("scalar", &[]),
    ("model.norm.weight", &[9]),
    ("two", &[2]),
];

fn number(tensor: usize, at: usize) -> f32 {
    f32::from_bits(((tensor * 1_000_003 + at) as u32).wrapping_mul(2_654_435_761))
}

fn numbers(tensor: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| number(tensor, at)).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// What a rank has of so many numbers: parts of equal length, the last one shorter.
fn cut(len: usize, world: usize, rank: usize) -> std::ops::Range<usize> {
    let part = len.div_ceil(world);
    (rank * part).min(len)..((rank + 1) * part).min(len)
}

/// Each tensor divided over `world` ranks; a small model of all that can occur.
fn write(dir: &Path, world: usize) -> Vec<(String, Shard)> {
    let state = json!({"step": 3, "seed": u64::MAX, "lr": 0.1});
    let files: Vec<_> = (0..world)
        .map(|rank| {
            let held: Vec<_> = TENSORS
                .iter()
                .enumerate()
                .map(|(tensor, (name, shape))| {
                    let all = numbers(tensor, shape.iter().product());
                    let range = cut(all.len(), world, rank);
                    (*name, *shape, range.clone(), all[range].to_vec())
                })
                .collect();
            let parts: Vec<_> = held
                .iter()
                .map(|(name, shape, range, data)| Part { name, shape, range: range.clone(), data })
                .collect();
            let objects = [("train_state", &state)];
            let mut file = fs::File::create(dir.join(dcp::shard_name(rank as u32))).unwrap();
            let shard = dcp::write_shard(&mut file, &parts, if rank == 0 { &objects } else { &[] }).unwrap();
            (dcp::shard_name(rank as u32), shard)
        })
        .collect();
    fs::write(dir.join(dcp::METADATA), dcp::metadata(&TENSORS, &files).unwrap()).unwrap();
    files
}

fn read_all(dcp: &Dcp, world: usize) {
    for (tensor, (name, shape)) in TENSORS.into_iter().enumerate() {
        let all = numbers(tensor, shape.iter().product());
        for rank in 0..world {
            let range = cut(all.len(), world, rank);
            let mut data = vec![0.0; range.len()];
            dcp.read(&mut PartMut { name, shape, range: range.clone(), data: &mut data }).unwrap();
            assert_eq!(bits(&data), bits(&all[range]), "{name} of rank {rank} of {world}");
        }
    }
}

#[test]
fn what_a_world_wrote_every_other_world_reads_bit_for_bit() {
    for written in [1, 2, 3, 4, 7, 16] {
        let dir = Dir::new(&format!("worlds-{written}"));
        let files = write(&dir.0, written);
        assert_eq!(verify(&dir.0), []);
        let dcp = Dcp::open(&dir.0).unwrap();
        for read in [1, 2, 3, 4, 5, 16] {
            read_all(&dcp, read);
        }
        assert_eq!(dcp.object("train_state").unwrap(), json!({"step": 3, "seed": u64::MAX, "lr": 0.1}));
        for (name, shard) in &files {
            let bytes = fs::read(dir.0.join(name)).unwrap();
            assert_eq!((bytes.len() as u64, crc32fast::hash(&bytes)), (shard.bytes, shard.crc32));
            for item in &shard.items {
                assert_eq!(item.at % 64, 0);
                let item_bytes = &bytes[item.at as usize..][..item.length as usize];
                assert_eq!(crc32fast::hash(item_bytes), item.crc32);
            }
        }
    }
}

/// As Python's zipfile reads it, checksums included; PyTorch itself reads the pickle in
/// interop/dcp.py.
#[test]
fn every_item_is_a_whole_zip_whose_numbers_lie_at_64_bytes() {
    const CHECK: &str = "
import io, struct, sys, zipfile
name, *places = sys.argv[1:]
whole = open(name, 'rb').read()
for at, length in (map(int, place.split(':')) for place in places):
    item = whole[at:at + length]
    archive = zipfile.ZipFile(io.BytesIO(item))
    assert archive.testzip() is None
    for entry in archive.infolist():
        name, extra = struct.unpack('<HH', item[entry.header_offset + 26:entry.header_offset + 30])
        assert (entry.header_offset + 30 + name + extra) % 64 == 0, entry.filename
        assert entry.compress_type == zipfile.ZIP_STORED
print(len(places))
";
    let dir = Dir::new("zip");
    for (name, shard) in &write(&dir.0, 2) {
        let places = shard.items.iter().map(|item| format!("{}:{}", item.at, item.length));
        let mut python = Command::new("python3");
        let python = python.args(["-c", CHECK]).arg(dir.0.join(name)).args(places);
        let Ok(said) = python.output() else {
            eprintln!("skipped: no python3");
            return;
        };
        let counted = String::from_utf8_lossy(&said.stdout).trim().to_string();
        assert_eq!(counted, shard.items.len().to_string(), "{}", String::from_utf8_lossy(&said.stderr));
    }
}

#[test]
fn what_pytorch_wrote_is_read_whatever_its_shards_and_types() {
    for world in [1, 2, 3, 5] {
        torch_checkpoint::check(&fixture(), world);
    }
}

/// https://github.com/awslabs/awsome-distributed-ai/issues/190
#[test]
fn a_checkpoint_without_metadata_or_a_shard_says_which_is_missing() {
    let dir = Dir::copy("missing", &fixture());
    fs::remove_file(dir.0.join("__1_0.distcp")).unwrap();
    assert_eq!(verify(&dir.0).iter().map(ToString::to_string).collect::<Vec<_>>(), ["__1_0.distcp is missing"]);
    let dcp = Dcp::open(&dir.0).unwrap();
    let error = dcp.object("train_state.step").unwrap_err().to_string();
    assert!(error.ends_with("__1_0.distcp is missing"), "{error}");

    fs::write(dir.0.join("__1_0.distcp"), b"").unwrap();
    let faults = verify(&dir.0);
    assert_eq!(faults.len(), 1);
    assert!(faults[0].to_string().starts_with("__1_0.distcp has 0 bytes, "), "{}", faults[0]);

    fs::remove_file(dir.0.join(dcp::METADATA)).unwrap();
    let fault = &verify(&dir.0)[0];
    assert_eq!(fault.to_string(), ".metadata is missing: the save was cut short, or this is no checkpoint");
}

/// https://github.com/pytorch/pytorch/issues/126604
#[test]
fn a_part_of_another_model_is_refused_with_both_shapes() {
    let dir = Dir::new("model");
    write(&dir.0, 2);
    let dcp = Dcp::open(&dir.0).unwrap();
    let mut data = [0.0; 4];
    let error = dcp.read(&mut PartMut { name: "two", shape: &[4], range: 0..4, data: &mut data }).unwrap_err();
    assert!(error.to_string().contains("two has shape [2], the model's has [4]"), "{error}");
    let error = dcp.read(&mut PartMut { name: "three", shape: &[4], range: 0..4, data: &mut data }).unwrap_err();
    assert!(matches!(error, DcpError::Absent { .. }) && error.to_string().contains("has no three"), "{error}");
    assert!(matches!(dcp.object("nothing"), Err(DcpError::Absent { .. })));
}

#[test]
fn no_metadata_is_made_of_files_that_lack_a_number_or_hold_one_twice() {
    let dir = Dir::new("incomplete");
    let files = write(&dir.0, 3);
    let refused = |files: &[(String, Shard)]| match dcp::metadata(&TENSORS, files) {
        Err(error @ DcpError::Incomplete { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let without = refused(&files[..2]);
    assert!(without.contains("model.a.weight lacks its numbers 62 to 91 of 91"), "{without}");
    let twice = refused(&[files.as_slice(), &files[1..2]].concat());
    assert!(twice.contains("model.a.weight has twice its numbers 31 to"), "{twice}");
    let mut other = files.clone();
    for item in &mut other[1].1.items {
        item.placed.as_mut().unwrap().shape.push(1);
    }
    assert!(refused(&other).contains("__1_0.distcp: model.a.weight has shape [13, 7, 1] here"), "{}", refused(&other));
    let json = serde_json::to_string(&files).unwrap();
    assert_eq!(serde_json::from_str::<Vec<(String, Shard)>>(&json).unwrap(), files);
}

#[test]
fn a_full_disk_is_what_the_file_says() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::Error::from_raw_os_error(libc::ENOSPC));
            }
            let now = bytes.len().min(self.0);
            self.0 -= now;
            Ok(now)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let data = vec![1.0; 1 << 20];
    let part = Part { name: "a", shape: &[1 << 20], range: 0..1 << 20, data: &data };
    let error = dcp::write_shard(&mut Full(3 << 20), &[part], &[]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
}

/// What a reader gets to see of a checkpoint, or why not.
fn content(dir: &Path, names: &[(String, Vec<usize>)]) -> Result<Vec<Vec<u32>>, String> {
    let dcp = Dcp::open(dir).map_err(|error| error.to_string())?;
    names
        .iter()
        .map(|(name, shape)| {
            let len = shape.iter().product();
            let mut data = vec![0.0; len];
            let part = &mut PartMut { name, shape, range: 0..len, data: &mut data };
            dcp.read(part).map_err(|error| error.to_string())?;
            Ok(bits(&data))
        })
        .collect()
}

fn names(dir: &Path) -> Vec<(String, Vec<usize>)> {
    Dcp::open(dir).unwrap().tensors().map(|(name, info)| (name.to_owned(), info.shape.clone())).collect()
}

fn flips_are_found_or_harmless(name: &str, from: &Path, every: usize) {
    let dir = Dir::copy(name, from);
    let names = names(&dir.0);
    let right = content(&dir.0, &names).unwrap();
    let mut found = 0;
    for entry in fs::read_dir(from).unwrap() {
        let path = dir.0.join(entry.unwrap().file_name());
        let file = path.file_name().unwrap().to_str().unwrap();
        let mut bytes = fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by(every) {
            let mask = [0x01, 0x80, 0xff][at % 3];
            bytes[at] ^= mask;
            fs::write(&path, &bytes).unwrap();
            let faults = verify(&dir.0);
            let got = content(&dir.0, &names);
            if faults.is_empty() {
                // In filler, or in a field that nobody reads; or in .metadata, which has no
                // checksum of its own: then a name is another.
                assert!(
                    got.as_ref() == Ok(&right) || file == dcp::METADATA && got.is_err(),
                    "byte {at} of {file}: {got:?}"
                );
            } else {
                found += 1;
                let faults = faults.iter().map(Fault::to_string).collect::<Vec<_>>();
                assert!(file == dcp::METADATA || faults.iter().all(|fault| fault.starts_with(file)), "{faults:?}");
            }
            bytes[at] ^= mask;
        }
        fs::write(&path, &bytes).unwrap();
    }
    assert!(found > 0);
    assert_eq!(verify(&dir.0), []);
}

/// torch.load compares no checksum: https://github.com/pytorch/pytorch/issues/126952
#[test]
fn a_flipped_bit_of_ours_is_found_or_harmless() {
    let dir = Dir::new("flip-from");
    write(&dir.0, 2);
    flips_are_found_or_harmless("flip", &dir.0, 7);
}

#[test]
fn a_flipped_bit_of_pytorchs_is_found_or_harmless() {
    flips_are_found_or_harmless("flip-torch", &fixture(), 29);
}

/// https://github.com/pytorch/torchtitan/issues/4011
#[test]
fn a_flipped_bit_in_the_numbers_names_file_and_tensor() {
    let dir = Dir::new("flip-number");
    let files = write(&dir.0, 2);
    let (file, shard) = &files[1];
    let item = shard.items.iter().find(|item| item.name == "model.norm.weight").unwrap();
    let path = dir.0.join(file);
    let mut bytes = fs::read(&path).unwrap();
    // The second half of 9 numbers is 4; they stand before the directory.
    let wanted: Vec<u8> = numbers(3, 9)[5..].iter().flat_map(|number| number.to_le_bytes()).collect();
    let at = item.at as usize;
    let found = bytes[at..].windows(16).position(|window| window == wanted).unwrap();
    bytes[at + found + 9] ^= 0x10;
    fs::write(&path, &bytes).unwrap();
    let wrong = "__1_0.distcp: model.norm.weight from [5] does not match its checksum (archive/data/0): it has changed \
                 since it was written";
    assert_eq!(verify(&dir.0).iter().map(ToString::to_string).collect::<Vec<_>>(), [wrong]);
    let mut data = [0.0; 9];
    let part = &mut PartMut { name: "model.norm.weight", shape: &[9], range: 0..9, data: &mut data };
    let error = Dcp::open(&dir.0).unwrap().read(part).unwrap_err().to_string();
    assert!(error.ends_with(wrong), "{error}");
}

/// https://github.com/pytorch/torchtitan/issues/4011
#[test]
fn a_truncated_file_is_always_found() {
    let ours = Dir::new("truncate-from");
    write(&ours.0, 2);
    for (name, from, every) in [("truncate", ours.0.as_path(), 23), ("truncate-torch", &fixture(), 101)] {
        let dir = Dir::copy(name, from);
        for entry in fs::read_dir(from).unwrap() {
            let path = dir.0.join(entry.unwrap().file_name());
            let bytes = fs::read(&path).unwrap();
            for len in (0..bytes.len()).step_by(every) {
                fs::write(&path, &bytes[..len]).unwrap();
                assert_ne!(verify(&dir.0), [], "{} cut at {len}", path.display());
            }
            fs::write(&path, &bytes).unwrap();
        }
    }
}

/// A `.metadata` as an attacker would write it: name and pickle.
fn hostile() -> Vec<(&'static str, Vec<u8>)> {
    let deep = |op: &[u8], times: usize| [b"\x80\x04N".as_slice(), &op.repeat(times), b"."].concat();
    vec![
        ("runs a command", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.".to_vec()),
        ("runs eval", b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.".to_vec()),
        ("nests a million tuples", deep(b"\x85", 1_000_000)),
        (
            "nests a million lists",
            [b"\x80\x04".as_slice(), &b"]".repeat(1_000_000), &b"a".repeat(999_999), b"."].concat(),
        ),
        ("is a list within itself", b"\x80\x02]q\x00h\x00a.".to_vec()),
        ("says it is long", b"\x80\x04X\xff\xff\xff\xff.".to_vec()),
        ("says it is longer", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.".to_vec()),
        ("has a long frame", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.".to_vec()),
        ("recalls the last memo", b"\x80\x02Nr\xff\xff\xff\xffj\xfe\xff\xff\xff.".to_vec()),
        ("pops what is not there", b"\x80\x0200.".to_vec()),
        ("pops through a mark", b"\x80\x02N(0.".to_vec()),
        ("ends without a value", b"\x80\x02.".to_vec()),
        ("is text", b"{\"step\": 3}".to_vec()),
        ("is of protocol 0", b"(dp0\n.".to_vec()),
        ("has a wide number", [b"\x80\x02\x8a\xff".as_slice(), &[0x7f; 255], b"."].concat()),
        ("is a bare class", b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.".to_vec()),
    ]
}

#[test]
fn a_hostile_metadata_is_refused_and_nothing_of_it_is_run() {
    let dir = Dir::new("hostile");
    for (what, bytes) in hostile() {
        fs::write(dir.0.join(dcp::METADATA), bytes).unwrap();
        let error = Dcp::open(&dir.0).map(drop).expect_err(what).to_string();
        assert!(error.contains(".metadata is ") && !error.contains('\n'), "{what}: {error}");
    }
}

#[test]
fn a_metadata_that_names_a_file_elsewhere_is_refused() {
    let dir = Dir::new("elsewhere");
    let mut files = write(&dir.0, 1);
    for name in ["/etc/passwd", "../__0_0.distcp", ""] {
        files[0].0 = name.to_owned();
        fs::write(dir.0.join(dcp::METADATA), dcp::metadata(&TENSORS, &files).unwrap()).unwrap();
        let error = Dcp::open(&dir.0).map(drop).unwrap_err().to_string();
        assert!(error.contains(&format!("names the file {name:?}")), "{error}");
    }
    // A directory and a pipe in its place do not block.
    write(&dir.0, 1);
    let shard = dir.0.join("__0_0.distcp");
    fs::remove_file(&shard).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&shard).status().unwrap().success());
    assert_eq!(verify(&dir.0)[0].to_string(), "__0_0.distcp cannot be read: it is no plain file");
    fs::remove_file(&shard).unwrap();
    fs::create_dir(&shard).unwrap();
    assert_eq!(verify(&dir.0)[0].to_string(), "__0_0.distcp cannot be read: it is no plain file");
}

/// Random edits of real files: an error or the truth, never a panic.
#[test]
fn random_edits_never_panic() {
    let dir = Dir::copy("edits", &fixture());
    let path = dir.0.join(dcp::METADATA);
    let original = fs::read(&path).unwrap();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for _ in 0..1000 {
        let mut bytes = original.clone();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => drop(bytes.drain(at..(at + random(40)).min(bytes.len()))),
                2 => {
                    let piece = bytes[at..(at + random(40)).min(bytes.len())].to_vec();
                    let to = random(bytes.len());
                    bytes.splice(to..to, piece);
                }
                _ => bytes[at] = b"().NRabceh0126tu\x85\x86\x87\x93\x94"[random(21)],
            }
        }
        fs::write(&path, &bytes).unwrap();
        if let Ok(dcp) = Dcp::open(&dir.0) {
            for (name, info) in dcp.tensors() {
                let len = info.shape.iter().product::<usize>();
                if len < 1000 {
                    let mut data = vec![0.0; len];
                    let _ = dcp.read(&mut PartMut { name, shape: &info.shape, range: 0..len, data: &mut data });
                }
            }
            dcp.objects().for_each(|name| drop(dcp.object(name)));
            let _ = verify(&dir.0);
        }
    }
}
