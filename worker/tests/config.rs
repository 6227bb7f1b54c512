//! Configurations as people write them, right and wrong.

use std::fs;
use std::path::{Path, PathBuf};

use palingenesis_worker::config::{Config, ExportDtype, ResumeFrom, describe};

/// Nine lines.
const ENOUGH: &str = "[model]\npath = \"/m\"\n[data]\npath = \"/d\"\n[train]\noutput_dir = \"/o\"\nsteps = 10\n\
                      global_batch_size = 4\nseq_len = 8\n";

fn variable(name: &str) -> Option<String> {
    match name {
        "HOME" => Some("/home/ada".into()),
        "SCRATCH" => Some("/scratch/ada".into()),
        "EMPTY" => Some(String::new()),
        "HF_TOKEN" => Some("hf_secret".into()),
        _ => None,
    }
}

fn parse(name: &str, text: &str, overrides: &[&str]) -> Result<Config, String> {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    Config::parse(Path::new(name), text, &overrides, &variable).map_err(|error| error.to_string())
}

fn with(overrides: &[&str]) -> Result<Config, String> {
    parse("train.toml", ENOUGH, overrides)
}

#[test]
fn toml_yaml_and_json_say_the_same() {
    let toml = r#"
[model.shape]
model_type = "qwen3"
vocab_size = 257
rope_theta = 1e4
[model.shape.rope_scaling]
factor = 8.0
[data]
path = "$SCRATCH/data"
shuffle = false
[train]
output_dir = "~/out"
resume_from = 500
steps = 1_000
micro_batch_size = 0x2
global_batch_size = 12
seq_len = 64
lr = 1
min_lr = 1e-5
seed = 18446744073709551615
[checkpoint]
export_dtype = "bf16"
every = 0
[comm]
key_file = "${HOME}/key"
"#;
    let yaml = r#"
model:
  shape: {model_type: qwen3, vocab_size: 257, rope_theta: 1.0e4, rope_scaling: {factor: 8.0}}
data:
  path: $SCRATCH/data
  shuffle: false
train:
  output_dir: ~/out
  resume_from: step-500
  steps: 1000
  micro_batch_size: 2
  global_batch_size: 12
  seq_len: 64
  lr: 1
  min_lr: 1e-5
  seed: 18446744073709551615
checkpoint:
  export_dtype: bf16
  every: 0
comm:
  key_file: ${HOME}/key
"#;
    let config = parse("train.toml", toml, &[]).unwrap();
    assert_eq!(config, parse("train.yaml", yaml, &[]).unwrap());
    assert_eq!(config, parse("train.YML", yaml, &[]).unwrap());
    assert_eq!(config, parse("train.conf", toml, &[]).unwrap());
    assert_eq!(config, parse("train", yaml, &[]).unwrap());

    assert_eq!(config.data.path, Path::new("/scratch/ada/data"));
    assert!(!config.data.shuffle && config.checkpoint.export);
    assert_eq!(config.train.output_dir, Path::new("/home/ada/out"));
    assert_eq!(config.train.resume_from, ResumeFrom::Path("/home/ada/out/step-500".into()));
    let train = &config.train;
    assert_eq!((train.steps, train.micro_batch_size, train.global_batch_size, train.seq_len), (1000, 2, 12, 64));
    assert_eq!((train.lr, train.min_lr, train.seed), (1.0, 1e-5, u64::MAX));
    assert_eq!((train.beta1, train.beta2, train.eps, train.grad_clip), (0.9, 0.95, 1e-8, 1.0));
    assert_eq!(config.checkpoint.export_dtype, ExportDtype::Bf16);
    assert_eq!(config.comm.key_file.as_deref(), Some(Path::new("/home/ada/key")));
    let shape = config.model.shape.unwrap();
    assert_eq!((shape["vocab_size"].as_u64(), shape["rope_scaling"]["factor"].as_f64()), (Some(257), Some(8.0)));
    let json = serde_json::json!({"model": {"path": "/m"}, "data": {"path": "/d"},
        "train": {"output_dir": "/o", "steps": 10, "global_batch_size": 4, "seq_len": 8}});
    assert_eq!(parse("train.json", &json.to_string(), &[]), with(&[]));
}

/// <https://github.com/yaml/pyyaml/issues/173>: some readers take 3e-4 for a text.
#[test]
fn yaml_numbers_without_a_point_are_numbers() {
    let yaml = "model: {path: /m}\ndata: {path: /d}\n\
                train: {output_dir: /o, steps: 10, global_batch_size: 4, seq_len: 8, lr: 3e-4}\n";
    assert_eq!(parse("a.yaml", yaml, &[]).unwrap().train.lr, 3e-4);
}

#[test]
fn overrides_are_typed_like_the_file_and_the_last_one_counts() {
    let config =
        with(&["--train.lr=1e-5", "train.lr=2e-5", "train.min_lr=0", "checkpoint.export=false", "--train.seed=7"]);
    let config = config.unwrap();
    assert_eq!((config.train.lr, config.train.min_lr, config.train.seed), (2e-5, 0.0, 7));
    assert!(!config.checkpoint.export);
    assert_eq!(with(&["train.resume_from=none"]).unwrap().train.resume_from, ResumeFrom::Never);
    assert_eq!(with(&["train.resume_from=12"]).unwrap().train.resume_from, ResumeFrom::Path("/o/step-12".into()));
    assert_eq!(with(&["data.path=/x=y"]).unwrap().data.path, Path::new("/x=y"));
    // A number is a path where a path is meant.
    let here = std::env::current_dir().unwrap();
    assert_eq!(with(&["data.path=2024"]).unwrap().data.path, here.join("2024"));

    let shape = "[model.shape]\nmodel_type = \"llama\"\nvocab_size = 5\n";
    let text = ENOUGH.replace("[model]\npath = \"/m\"\n", shape);
    let overrides =
        ["model.shape.vocab_size=300", "model.shape.rope_scaling={\"factor\":2}", "model.shape.hidden_act=silu"];
    let shape = parse("a.toml", &text, &overrides).unwrap().model.shape.unwrap();
    let expected = serde_json::json!(
        {"model_type": "llama", "vocab_size": 300, "rope_scaling": {"factor": 2}, "hidden_act": "silu"}
    );
    assert_eq!(shape, expected);

    let whole = "must be a whole number from 1 to 1099511627776";
    for (given, told) in [
        ("train.lr", "'train.lr' is no override; one looks like train.lr=3e-4"),
        ("train.lrr=1", "unknown key 'train.lrr'; did you mean train.lr?"),
        ("trian.steps=1", "unknown key 'trian.steps'; did you mean train.steps?"),
        ("lr=1", "key 'lr' stands in no section; it is train.lr"),
        ("train.steps=ten", &format!("train.steps = \"ten\" {whole}")),
        ("train.steps=", &format!("train.steps = \"\" {whole}")),
        ("train.steps=1e3", &format!("train.steps = 1000.0 {whole}; write 1000")),
        ("train.lr=inf", "train.lr = \"inf\" must be a number from 0 to 10"),
        ("checkpoint.export=yes", "checkpoint.export = \"yes\" must be true or false"),
        ("model.shape.vocab_size=3", "model.path and model.shape exclude each other; keep the one that is meant"),
        ("model.shape=3", "model.shape = 3 must be a section with keys of config.json"),
        ("data.path=", "data.path = \"\" is no path"),
    ] {
        assert_eq!(with(&[given]).unwrap_err(), format!("command line: {told}"));
    }
}

/// Passed over, they would be as if they were not there: their defaults make another model.
/// Names as Meta's params.json, torchtitan and slips of the pen have them.
#[test]
fn a_mistyped_key_of_a_shape_is_told() {
    let shape = |key: &str| ENOUGH.replace("path = \"/m\"\n", &format!("[model.shape]\nvocab_size = 5\n{key} = 2\n"));
    for (key, meant) in [
        ("num_key_value_head", "num_key_value_heads"),
        ("n_kv_heads", "num_key_value_heads"),
        ("norm_eps", "rms_norm_eps"),
        ("rope_thete", "rope_theta"),
        ("tie_word_embedding", "tie_word_embeddings"),
    ] {
        let error = parse("a.toml", &shape(key), &[]).unwrap_err();
        assert_eq!(error, format!("a.toml:2: unknown key 'model.shape.{key}'; did you mean {meant}?"));
    }
    // What else config.json files of these families on huggingface.co have.
    for key in [
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "pretraining_tp",
        "rope_interleaved",
        "is_llama_config",
        "unsloth_fixed",
        "attention_bias",
        "mlp_bias",
        "num_experts",
        "num_local_experts",
        "quantization_config",
        "hidden_dropout",
        "hidden_activation",
        "head_dim",
        "layer_types",
        "decoder_start_token_id",
        "tie_encoder_decoder",
        "output_hidden_states",
        "return_dict",
        "original_max_position_embeddings",
    ] {
        let config = parse("a.toml", &shape(key), &[]).unwrap();
        assert_eq!(config.model.shape.unwrap()[key], 2, "{key}");
    }
}

#[test]
fn what_is_not_known_is_told_with_its_line_and_what_is_near() {
    for (text, told) in [
        ("lrr = 1.0\n", "10: unknown key 'train.lrr'; did you mean train.lr?"),
        ("max_grad_norm = 1.0\n", "10: unknown key 'train.max_grad_norm'; did you mean train.grad_clip?"),
        ("keep = 5\n", "10: unknown key 'train.keep'; did you mean checkpoint.keep?"),
        ("colour = 5\n", "10: unknown key 'train.colour'; all keys are in palingenesis-worker's help"),
        ("[checkpiont]\nkeep = 5\n", "10: unknown section 'checkpiont'; did you mean checkpoint?"),
        ("[optimizer]\n", "10: unknown section 'optimizer'; there are model, data, train, checkpoint, comm"),
        ("steps = 5\n", "10: not TOML: duplicate key"),
        ("lr = \"1e-3\"\n", "10: train.lr = \"1e-3\" must be a number from 0 to 10; write it without quotes"),
        ("lr = nan\n", "10: train.lr = \"nan\" must be a number from 0 to 10"),
        ("lr = 11\n", "10: train.lr = 11 must be a number from 0 to 10"),
        ("lr = [1, 2]\n", "10: train.lr = a list must be a number from 0 to 10"),
        ("beta2 = 1.0\n", "10: train.beta2 = 1.0 must be a number from 0, below 1"),
        ("eps = 0\n", "10: train.eps = 0 must be a number above 0"),
        ("micro_batch_size = 0\n", "10: train.micro_batch_size = 0 must be a whole number from 1 to 2147483648"),
        ("seed = -1\n", "10: train.seed = -1 must be a whole number of at least 0"),
        ("warmup_steps = 11\n", "10: train.warmup_steps = 11 is above train.steps = 10; lr would never be reached"),
        ("min_lr = 1.0\n", "10: train.min_lr = 1 is above train.lr = 0.0003; the rate falls from lr to min_lr"),
        (
            "resume_from = \"atuo\"\n",
            "10: train.resume_from = \"atuo\" is near \"auto\"; write that, or ./atuo for a path",
        ),
        ("[checkpoint]\nkeep = 0\n", "11: checkpoint.keep = 0 must be a whole number from 1 to 1048576"),
        ("[checkpoint]\nkeep = -1\n", "11: checkpoint.keep = -1 must be a whole number from 1 to 1048576"),
        ("[checkpoint]\nexport_dtype = \"fp16\"\n", "11: checkpoint.export_dtype = \"fp16\" must be one of f32, bf16"),
        (
            "[model.shape]\nvocab_size = 5\n",
            "10: model.path and model.shape exclude each other; keep the one that is meant",
        ),
        ("[comm]\nkey_file = 5\n", "11: comm.key_file = 5 must be a path in quotes"),
    ] {
        let error = parse("train.toml", &format!("{ENOUGH}{text}"), &[]).unwrap_err();
        assert_eq!(error, format!("train.toml:{told}"));
    }
    let few = "[model]\npath = \"/m\"\n[data]\npath = \"/d\"\n[train]\nsteps = 1\n";
    assert_eq!(
        parse("train.toml", few, &[]).unwrap_err(),
        "train.toml: train.output_dir is missing (checkpoints, metrics, the final model; shared by all nodes); it must \
         be a path in quotes"
    );
    let nothing = parse("train.toml", &ENOUGH.replace("path = \"/m\"\n", ""), &[]).unwrap_err();
    assert!(nothing.starts_with("train.toml: no model; give model.path"), "{nothing}");
    let outside = parse("t.toml", "steps = 5\n", &[]).unwrap_err();
    assert_eq!(outside, "t.toml:1: key 'steps' stands in no section; it is train.steps");
    let plain = parse("t.toml", "train = 5\n", &[]).unwrap_err();
    assert_eq!(plain, "t.toml:1: train is a section, and has keys of its own");
}

#[test]
fn yaml_faults_have_their_lines_too() {
    let yaml = "model: {path: /m}\ndata:\n  path: /d\ntrain:\n  output_dir: /o\n  steps: 10\n  \
                global_batch_size: 4\n  seq_len: 8\n";
    for (text, told) in [
        ("  lrr: 1.0\n", "9: unknown key 'train.lrr'; did you mean train.lr?"),
        ("  lr: 3,5\n", "9: train.lr = \"3,5\" must be a number from 0 to 10"),
        ("  lr: .nan\n", "9: train.lr = \"NaN\" must be a number from 0 to 10"),
        ("  lr:\n", "9: train.lr is empty, but must be a number from 0 to 10"),
        ("  seed: 1_000\n", "9: train.seed = \"1_000\" must be a whole number of at least 0; write digits only"),
        ("checkpoint:\n  # of these\n  export: no\n", "11: checkpoint.export = \"no\" must be true or false"),
        ("chekpoint:\n  keep: 5\n", "9: unknown section 'chekpoint'; did you mean checkpoint?"),
        ("checkpoint: 5\n", "9: checkpoint is a section, and has keys of its own"),
    ] {
        let error = parse("a.yaml", &format!("{yaml}{text}"), &[]).unwrap_err();
        assert_eq!(error, format!("a.yaml:{told}"));
    }
    let twice = parse("a.yaml", &format!("{yaml}  steps: 5\n"), &[]).unwrap_err();
    assert!(twice.starts_with("a.yaml:9: not YAML: ") && twice.contains("key 'steps' is there twice"), "{twice}");
    // A section without keys is none; a file without sections says what it needs.
    assert!(parse("a.yaml", &format!("{yaml}comm:\n"), &[]).is_ok());
    assert!(parse("a.yaml", "", &[]).unwrap_err().contains("train.output_dir is missing"));
    let neither = parse("a", "= : [\n", &[]).unwrap_err();
    assert!(neither.contains("neither TOML") && neither.ends_with("name it .toml or .yaml"), "{neither}");
}

#[test]
fn paths_have_variables_and_never_secrets() {
    let path = |text: &str| with(&[&format!("data.path={text}")]).map(|config| config.data.path);
    let here = std::env::current_dir().unwrap();
    assert_eq!(path("data"), Ok(here.join("data")));
    assert_eq!(path("./a/../b"), Ok(here.join("a/../b")));
    assert_eq!(path("~"), Ok(PathBuf::from("/home/ada")));
    assert_eq!(path("~bob/x"), Ok(here.join("~bob/x")));
    assert_eq!(path("$SCRATCH/$HOME"), Ok(PathBuf::from("/scratch/ada/home/ada")));
    assert_eq!(path("/a$$b"), Ok(PathBuf::from("/a$b")));
    for (text, told) in [
        ("$SCRATCHX/d", "variable SCRATCHX is not set on this node; export it, or write the path itself"),
        ("$EMPTY/d", "variable EMPTY is empty; set it, or write the path itself"),
        ("/d/$HF_TOKEN", "variable HF_TOKEN holds a secret, which paths do not; take another"),
        ("/d/${HOME", "has a $ without a name"),
        ("/d/${HOME:-x}", "has a $ without a name"),
        ("/d/$", "has a $ without a name"),
    ] {
        let error = path(text).unwrap_err();
        assert!(error.starts_with("command line: data.path = ") && error.contains(told), "{error}");
        assert!(!error.contains("hf_secret"));
    }
}

/// <https://github.com/qiskit-community/spank-plugins/issues/72>: each kind of unusable file is
/// one line with the reason, and nothing waits or panics.
#[test]
fn files_that_are_none_are_told() {
    let dir = std::env::temp_dir().join(format!("palingenesis-config-{}", std::process::id()));
    fs::create_dir_all(dir.join("dir.toml")).unwrap();
    fs::write(dir.join("latin.toml"), b"[train]\n# gr\xfc\xdfe\n").unwrap();
    fs::write(dir.join("long.toml"), vec![b'#'; (1 << 20) + 1]).unwrap();
    fs::write(dir.join("empty.toml"), "").unwrap();
    fs::write(dir.join("good.toml"), format!("\u{feff}{ENOUGH}")).unwrap();
    let status = std::process::Command::new("mkfifo").arg(dir.join("fifo.toml")).status();
    assert!(status.is_ok_and(|status| status.success()));
    let read = |name: &str| Config::read(&dir.join(name), &[]).map_err(|error| error.to_string());
    for (name, told) in [
        ("none.toml", "cannot be opened: No such file"),
        ("dir.toml", "is a directory; name a TOML or YAML file"),
        ("fifo.toml", "is no regular file"),
        ("latin.toml", "is not UTF-8 in line 2; save it as UTF-8"),
        ("long.toml", "is longer than 1048576 bytes"),
        ("empty.toml", "train.output_dir is missing"),
    ] {
        let error = read(name).unwrap_err();
        assert!(error.contains(told) && error.contains(name), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
    assert_eq!(read("good.toml").unwrap().train.steps, 10);
    let relative = Config::read(Path::new("no-such.toml"), &[]).unwrap_err().to_string();
    assert!(relative.contains("looked for from the working directory, /"), "{relative}");
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_example_has_every_key_with_its_default() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../etc/worker.toml");
    let text = fs::read_to_string(path).unwrap();
    let inside = |name: &str| if name == "PWD" { Some("/work".into()) } else { variable(name) };
    let read = |text: &str| Config::parse(Path::new("worker.toml"), text, &[], &inside).unwrap();
    let example = read(&text);
    // Commented lines are the defaults, so that nothing changes without the #; the
    // keys without a default are examples.
    let uncomment = |line: &str| match line.strip_prefix('#') {
        Some(setting)
            if ["#", "path", "key_file", "cuda_libraries"].iter().all(|start| !setting.starts_with(start)) =>
        {
            format!("{setting}\n")
        }
        _ => format!("{line}\n"),
    };
    assert_eq!(read(&text.lines().map(uncomment).collect::<String>()), example);
    for line in describe().lines() {
        let name = line.split_whitespace().next().unwrap();
        let written = match name {
            "shape" => "[model.shape]".to_string(),
            _ if line.starts_with(' ') => format!("{name} = "),
            _ => name.to_string(),
        };
        let there = |line: &str| line.trim_start_matches('#').starts_with(&written);
        assert!(text.lines().any(there), "{written} is not in the example");
    }
}

#[test]
fn damaged_files_give_one_line_and_no_panic() {
    let aliases = "a: &a [x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n\
                   d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\n\
                   f: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: [*f,*f,*f,*f,*f,*f,*f,*f,*f]\n";
    let deep = ["[".repeat(100_000), "{a: ".repeat(100_000), format!("a = {}", "[".repeat(100_000))];
    let texts = [aliases, "- 1\n- 2\n", "!!python/object:os.system x\n", "5", "\0", "---\na: 1\n---\nb: 1\n"];
    for text in texts.into_iter().chain(deep.iter().map(String::as_str)) {
        for name in ["a.toml", "a.yaml", "a"] {
            let error = parse(name, text, &[]).unwrap_err();
            assert!(error.lines().count() == 1 && error.len() < 400, "{error}");
        }
    }
    // Every byte of two good files replaced by some that mean something.
    let yaml = "model: {path: &a /m}\ndata: {path: *a}\n\
                train: {output_dir: /o, steps: 10, global_batch_size: 4, seq_len: 8}\n";
    for (name, text) in [("a.toml", ENOUGH), ("a.yaml", yaml)] {
        parse(name, text, &[]).unwrap();
        for at in 0..text.len() {
            for byte in ["\0", "\n", "\"", "[", "{", ":", "=", "$", "\u{e9}", "-", "9", ""] {
                let damaged = format!("{}{byte}{}", &text[..at], &text[at + 1..]);
                if let Err(error) = parse(name, &damaged, &[]) {
                    assert_eq!(error.lines().count(), 1, "{error}");
                }
            }
        }
    }
}
