//! Weights for other programs and from them: read by the safetensors crate, written by it.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use half::{bf16, f16};
use palingenesis_worker::checkpoint::{
    CheckpointError, Checkpoints, Dtype, Export, Exported, Import, PartMut, tokenizer_files,
};
use palingenesis_worker::model::Spec;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as Stored, TensorView, serialize_to_file};
use serde_json::{Value, json};

fn tensors() -> Vec<(String, Vec<usize>)> {
    vec![("model.embed_tokens.weight".into(), vec![3, 2]), ("model.norm.weight".into(), vec![2])]
}

const EMBEDDING: [f32; 6] = [1.0, -2.5, std::f32::consts::PI, 1e-30, -0.0, 65504.0];
const NORM: [f32; 2] = [0.1, 0.2];

fn export(output: &Path, dtype: Dtype) -> Exported {
    let config = json!({"model_type": "llama", "hidden_size": 2});
    let data = output.join("data");
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("tokenizer.json"), "{}").unwrap();
    fs::write(data.join("shard-0.bin"), "no companion").unwrap();
    let copy = tokenizer_files(&[&output.join("nowhere"), &data]);
    let what = Export { tensors: &tensors(), dtype, config: &config, copy: &copy };
    let mut exporter = Checkpoints::new(output, None, "n1", Duration::ZERO).export(&what).unwrap();
    exporter.tensor("model.norm.weight", &NORM).unwrap();
    exporter.tensor("model.embed_tokens.weight", &EMBEDDING).unwrap();
    exporter.finish().unwrap()
}

fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn the_safetensors_crate_reads_what_is_exported() {
    let output = tempfile::tempdir().unwrap();
    let exported = export(output.path(), Dtype::F32);
    assert_eq!(exported.directory, output.path().join("final"));
    assert_eq!(
        names(&exported.directory),
        ["config.json", "export.json", "model.safetensors", "tokenizer.json"].map(String::from).into()
    );
    let bytes = fs::read(exported.directory.join("model.safetensors")).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.len(), 2);
    let embedding = read.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!((embedding.dtype(), embedding.shape()), (Stored::F32, &[3, 2][..]));
    assert_eq!(embedding.data(), EMBEDDING.map(f32::to_le_bytes).concat());
    // transformers refuses a file that does not say for which framework it is.
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    let config: Value = serde_json::from_slice(&fs::read(exported.directory.join("config.json")).unwrap()).unwrap();
    assert_eq!(config, json!({"model_type": "llama", "hidden_size": 2, "torch_dtype": "float32"}));
}

#[test]
fn bf16_is_rounded_to_nearest_even() {
    let output = tempfile::tempdir().unwrap();
    let exported = export(output.path(), Dtype::Bf16);
    let bytes = fs::read(exported.directory.join("model.safetensors")).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let embedding = read.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!(embedding.dtype(), Stored::BF16);
    assert_eq!(embedding.data(), EMBEDDING.map(|number| bf16::from_f32(number).to_le_bytes()).concat());
    // pi is between 0x4049 (3.140625) and 0x404a (3.15625), nearer to the first.
    assert_eq!(embedding.data()[4..6], [0x49, 0x40]);
}

#[test]
fn a_second_export_replaces_the_first_as_a_whole_and_nothing_of_anybody_else() {
    let output = tempfile::tempdir().unwrap();
    export(output.path(), Dtype::F32);
    let exported = export(output.path(), Dtype::Bf16);
    assert_eq!(exported.aside, None);
    assert_eq!(names(output.path()), ["data", "final"].map(String::from).into());
    fs::write(output.path().join("final/README.md"), "my notes").unwrap();
    let aside = export(output.path(), Dtype::F32).aside.unwrap();
    assert_eq!(fs::read_to_string(aside.join("README.md")).unwrap(), "my notes");
    fs::remove_dir_all(output.path().join("final")).unwrap();
    fs::write(output.path().join("final"), "a file of somebody").unwrap();
    let aside = export(output.path(), Dtype::F32).aside.unwrap();
    assert_eq!(fs::read_to_string(aside).unwrap(), "a file of somebody");
}

#[test]
fn an_export_that_is_given_up_leaves_what_was_there() {
    let output = tempfile::tempdir().unwrap();
    export(output.path(), Dtype::F32);
    let before = fs::read(output.path().join("final/model.safetensors")).unwrap();
    let config = json!({});
    let what = Export { tensors: &tensors(), dtype: Dtype::F32, config: &config, copy: &[] };
    let mut exporter = Checkpoints::new(output.path(), None, "n1", Duration::ZERO).export(&what).unwrap();
    exporter.tensor("model.norm.weight", &NORM).unwrap();
    for (name, numbers, why) in [
        ("model.norm.weight", &NORM[..], "came twice"),
        ("model.embed_tokens.weight", &NORM[..], "has 2 numbers instead of 6"),
        ("lm_head.weight", &NORM[..], "was not announced"),
    ] {
        let error = exporter.tensor(name, numbers).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(why), "{error}");
    }
    let error = exporter.finish().unwrap_err().to_string();
    assert!(error.contains("model.embed_tokens.weight has not come"), "{error}");
    assert_eq!(fs::read(output.path().join("final/model.safetensors")).unwrap(), before);
    assert_eq!(names(output.path()), ["data", "final"].map(String::from).into());
}

/// Models that transformers has saved go in and out. Where `EXPORT_TO` names a directory
/// they stay there, so that a person can let transformers load them.
#[test]
fn a_model_of_transformers_goes_in_and_out_unchanged() {
    for name in ["qwen3", "llama3"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model").join(name);
        let config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
        let spec = Spec::from_hf(&config).unwrap();
        let tensors: Vec<(String, Vec<usize>)> =
            spec.units().into_iter().flat_map(|unit| unit.tensors).map(|tensor| (tensor.name, tensor.shape)).collect();
        let import = Import::open(&from).unwrap();
        import.check(&tensors, spec.tied).unwrap();

        let temporary = tempfile::tempdir().unwrap();
        let output = std::env::var_os("EXPORT_TO").map_or_else(|| temporary.path().into(), PathBuf::from).join(name);
        let config = spec.to_hf();
        let what = Export { tensors: &tensors, dtype: Dtype::F32, config: &config, copy: &[] };
        let mut exporter = Checkpoints::new(&output, None, "n1", Duration::ZERO).export(&what).unwrap();
        for (name, shape) in &tensors {
            let mut data = vec![0.0; shape.iter().product()];
            import.read(&mut PartMut { name, shape, range: 0..data.len(), data: &mut data }).unwrap();
            exporter.tensor(name, &data).unwrap();
        }
        let exported = exporter.finish().unwrap();

        let theirs = fs::read(from.join("model.safetensors")).unwrap();
        let ours = fs::read(exported.directory.join("model.safetensors")).unwrap();
        let (theirs, ours) = (SafeTensors::deserialize(&theirs).unwrap(), SafeTensors::deserialize(&ours).unwrap());
        assert_eq!(theirs.names().iter().collect::<BTreeSet<_>>(), ours.names().iter().collect::<BTreeSet<_>>());
        for (name, tensor) in theirs.iter() {
            let own = ours.tensor(name).unwrap();
            assert_eq!(
                (tensor.shape(), tensor.dtype(), tensor.data()),
                (own.shape(), own.dtype(), own.data()),
                "{name}"
            );
        }
    }
}

fn write(directory: &Path, tensors: &[(&str, Stored, &[usize], Vec<u8>)]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    serialize_to_file(views, None::<HashMap<String, String>>, &directory.join("model.safetensors")).unwrap();
}

fn f32s(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

#[test]
fn each_type_of_numbers_is_read_into_any_part() {
    let directory = tempfile::tempdir().unwrap();
    let whole: Vec<f32> = (0..12).map(|at| at as f32 * 0.5 - 3.0).collect();
    let halves: Vec<u8> = whole.iter().flat_map(|number| f16::from_f32(*number).to_le_bytes()).collect();
    let brains: Vec<u8> = whole.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect();
    write(
        directory.path(),
        &[
            ("f32", Stored::F32, &[4, 3], f32s(&whole)),
            ("f16", Stored::F16, &[4, 3], halves),
            ("bf16", Stored::BF16, &[4, 3], brains),
        ],
    );
    let import = Import::open(directory.path()).unwrap();
    for name in ["f32", "f16", "bf16"] {
        for range in [0..12, 0..0, 5..11, 11..12] {
            let mut data = vec![9.0; range.len()];
            import.read(&mut PartMut { name, shape: &[4, 3], range: range.clone(), data: &mut data }).unwrap();
            assert_eq!(data, whole[range]);
        }
    }
}

fn refused(directory: &Path, wanted: &[(String, Vec<usize>)], tied: bool) -> String {
    match Import::open(directory).unwrap().check(wanted, tied).unwrap_err() {
        CheckpointError::Refused(text) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn missing_extra_and_wrong_tensors_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let embedding = "model.embed_tokens.weight";
    let old = "model.layers.0.self_attn.rotary_emb.inv_freq";
    write(
        directory.path(),
        &[
            (embedding, Stored::F32, &[3, 2], f32s(&EMBEDDING)),
            (old, Stored::F32, &[1], f32s(&[1.0])),
            ("odd", Stored::I64, &[1], vec![0; 8]),
        ],
    );
    let text = refused(directory.path(), &tensors(), false);
    assert!(text.contains("missing: model.norm.weight; not of this model: odd"), "{text}");
    let text = refused(directory.path(), &[(embedding.into(), vec![2, 3]), ("odd".into(), vec![1])], false);
    assert!(text.contains("model.embed_tokens.weight has shape [3, 2], and config.json gives [2, 3]"), "{text}");
    assert!(text.contains("odd is I64; F32, BF16 and F16 are read"), "{text}");
}

/// <https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py>:
/// a tied output projection is not stored, but other programs do store it.
#[test]
fn a_tied_output_projection_may_be_stored_if_it_is_the_embedding() {
    let directory = tempfile::tempdir().unwrap();
    let (embedding, head) = ("model.embed_tokens.weight", "lm_head.weight");
    let wanted = [(embedding.to_string(), vec![3, 2])];
    let stored = |head_numbers: &[f32]| {
        write(
            directory.path(),
            &[(embedding, Stored::F32, &[3, 2], f32s(&EMBEDDING)), (head, Stored::F32, &[3, 2], f32s(head_numbers))],
        );
    };
    stored(&EMBEDDING);
    Import::open(directory.path()).unwrap().check(&wanted, true).unwrap();
    assert!(refused(directory.path(), &wanted, false).contains("not of this model: lm_head.weight"));
    stored(&[0.0; 6]);
    assert!(refused(directory.path(), &wanted, true).contains("lm_head.weight is not model.embed_tokens.weight"));
    write(directory.path(), &[(embedding, Stored::F32, &[3, 2], f32s(&EMBEDDING))]);
    Import::open(directory.path()).unwrap().check(&wanted, true).unwrap();
    let untied = [wanted[0].clone(), (head.to_string(), vec![3, 2])];
    let text = refused(directory.path(), &untied, false);
    assert!(text.contains("missing: lm_head.weight") && text.contains("\"tie_word_embeddings\": true"), "{text}");
}

#[test]
fn garbage_is_an_error_that_names_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let error = Import::open(directory.path()).unwrap_err().to_string();
    assert!(error.contains("has neither model.safetensors nor model.safetensors.index.json"), "{error}");
    write(directory.path(), &[("a", Stored::F32, &[3, 2], f32s(&EMBEDDING))]);
    let path = directory.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let error = Import::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains("model.safetensors"), "{error}");
    }
    fs::write(&path, [0xff; 64]).unwrap();
    assert!(Import::open(directory.path()).unwrap_err().to_string().contains("is damaged: a header of"));
    fs::remove_file(&path).unwrap();
    let index = directory.path().join("model.safetensors.index.json");
    for (text, why) in [
        ("{", "is damaged: EOF"),
        (r#"{"weight_map": {"a": "../../etc/x.safetensors"}}"#, "is no safetensors file beside it"),
        (r#"{"weight_map": {"a": "/dev/zero"}}"#, "is no safetensors file beside it"),
        (r#"{"weight_map": {"a": "gone.safetensors"}}"#, "gone.safetensors cannot be read: no such file"),
    ] {
        fs::write(&index, text).unwrap();
        let error = Import::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
