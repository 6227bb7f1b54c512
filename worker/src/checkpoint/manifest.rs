//! What a checkpoint says of itself: its files with their sizes and checksums, and where
//! the training stood. It bears a checksum of its own.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::TrainState;
use super::names::{self, MANIFEST};

/// The form of manifests that this program writes and reads.
const FORMAT: u32 = 1;
/// In place of a manifest's checksum while it is computed.
const ZEROS: &str = "00000000";
/// None is longer: a file of a rank takes about 100 bytes, a tensor as many.
const LONGEST: u64 = 256 << 20;

/// `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// 1.
    pub format: u32,
    /// As in the directory's name.
    pub step: u64,
    /// How many ranks wrote it.
    pub world_size: u32,
    /// Which launch wrote it.
    pub launch: String,
    /// Where the training stood.
    pub state: TrainState,
    /// The configuration, as far as it may not change between launches.
    pub config: serde_json::Value,
    /// All files but this one.
    pub files: Vec<FileSum>,
    /// All tensors.
    pub tensors: Vec<TensorShape>,
    /// CRC-32 of manifest.json with eight zeros here, as eight hexadecimal digits.
    pub crc32: String,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSum {
    /// Below the step's directory: "dcp/__3_0.distcp".
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 (the zip format's) of all of it.
    pub crc32: u32,
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorShape {
    /// As in [`super::Part`].
    pub name: String,
    /// Of the whole tensor.
    pub shape: Vec<usize>,
}

impl Manifest {
    /// One in today's form.
    pub(super) fn new(
        launch: &str,
        world_size: u32,
        state: &TrainState,
        config: &serde_json::Value,
        files: Vec<FileSum>,
        tensors: Vec<TensorShape>,
    ) -> Manifest {
        let mut manifest = Manifest {
            format: FORMAT,
            step: state.step,
            world_size,
            launch: launch.to_string(),
            state: state.clone(),
            config: config.clone(),
            files,
            tensors,
            crc32: ZEROS.into(),
        };
        manifest.crc32 = sum(&manifest.to_json());
        manifest
    }

    /// For people to read, too.
    pub(super) fn to_json(&self) -> Vec<u8> {
        // What came from JSON, or is made of numbers and strings, is never an error there.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Of a step's directory; nothing where none is there. Otherwise why it is of no use.
    pub(super) fn read(directory: &Path) -> Result<Option<Manifest>, String> {
        let bytes = match names::read_small(&directory.join(MANIFEST), LONGEST) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{MANIFEST} cannot be read: {}", super::why(&error))),
            Ok(bytes) => bytes,
        };
        Manifest::parse(bytes).map(Some).map_err(|what| format!("{MANIFEST} {what}"))
    }

    fn parse(mut bytes: Vec<u8>) -> Result<Manifest, String> {
        #[derive(Deserialize)]
        struct Form {
            format: u32,
        }
        match serde_json::from_slice(&bytes) {
            Ok(Form { format: FORMAT }) => {}
            Ok(Form { format }) => return Err(format!("has format {format}, and this version reads format {FORMAT}")),
            Err(error) => return Err(format!("is damaged: {error}")),
        }
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| format!("is damaged: {error}"))?;
        // The checksum is the last thing in it.
        let end = bytes.iter().rposition(|byte| *byte == b'"').unwrap_or_default();
        let digits = bytes.get_mut(end.saturating_sub(ZEROS.len())..end).filter(|digits| digits.len() == ZEROS.len());
        digits.ok_or("is damaged: it has no checksum")?.copy_from_slice(ZEROS.as_bytes());
        if manifest.crc32 != sum(&bytes) {
            return Err("is damaged: its checksum does not fit".into());
        }
        match manifest.files.iter().find(|file| !is_inside(&file.name)) {
            Some(file) => Err(format!("names {:?}, which is no file of a checkpoint", file.name)),
            None => Ok(manifest),
        }
    }
}

fn sum(json: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(json))
}

/// `dcp/NAME`, the only place where a checkpoint's files lie.
pub(super) fn is_inside(name: &str) -> bool {
    name.strip_prefix("dcp/")
        .is_some_and(|file| !file.is_empty() && file != "." && file != ".." && !file.contains(['/', '\0']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Schedule;

    fn example() -> Manifest {
        let state = TrainState {
            step: 500,
            samples: 64_000,
            schedule: Schedule { steps: 1000, warmup_steps: 10, lr: 3e-4, min_lr: 3e-5 },
            ..TrainState::default()
        };
        let config = serde_json::json!({"model": {"hidden": 64}, "lr": 3e-4, "b": 1, "a": [0.1]});
        let files = vec![FileSum { name: "dcp/__0_0.distcp".into(), bytes: 1 << 40, crc32: 7 }];
        Manifest::new("4711", 4, &state, &config, files, vec![TensorShape { name: "w".into(), shape: vec![2, 3] }])
    }

    #[test]
    fn what_is_written_is_read_bit_for_bit() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(Manifest::read(directory.path()), Ok(None));
        std::fs::write(directory.path().join(MANIFEST), example().to_json()).unwrap();
        assert_eq!(Manifest::read(directory.path()), Ok(Some(example())));
    }

    #[test]
    fn a_flipped_bit_anywhere_is_found() {
        let whole = example().to_json();
        assert!(Manifest::parse(whole.clone()).is_ok());
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            let why = Manifest::parse(bytes).unwrap_err();
            assert!(why.starts_with("is damaged") || why.starts_with("has format"), "{why}");
        }
        for length in 0..whole.len() {
            assert!(Manifest::parse(whole[..length].to_vec()).is_err());
        }
    }

    #[test]
    fn files_outside_are_refused() {
        for name in ["dcp/../x", "dcp/..", "dcp/.", "dcp/", "/etc/passwd", "../dcp/x", "dcp", "x", "dcp/a/b", "dcp/a\0"]
        {
            assert!(!is_inside(name), "{name}");
        }
        assert!(is_inside("dcp/.metadata") && is_inside("dcp/__0_0.distcp"));
    }
}
