//! From values to a [`Config`]: types, ranges, what belongs together, and paths.

use std::path::{Path, PathBuf};

use palingenesis::config::printable;
use palingenesis::report::is_secret;
use serde_json::Value;

use super::keys::{self, Key, Takes};
use super::parse::{self, All};
use super::{
    CheckpointConfig, CommConfig, Config, ConfigError, DataConfig, Device, ExportDtype, ModelConfig, ResumeFrom,
    TrainConfig,
};
use crate::engine::Precision;

type Result<T> = std::result::Result<T, ConfigError>;

/// A variable of the environment.
pub type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Of a word; `None` where it is left to the device.
fn precision(word: &str) -> Option<Precision> {
    match word {
        "f32" => Some(Precision::F32),
        "bf16" => Some(Precision::Bf16),
        _ => None,
    }
}

impl Config {
    /// Reads a file, TOML or YAML by its ending, and then `overrides`, each
    /// `section.key=value` with or without `--` before it; the last one counts.
    ///
    /// # Errors
    /// The file cannot be read, or the first thing in it that is not understood.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Config> {
        let text = parse::read(path)?;
        Config::parse(path, &text, overrides, &|name| std::env::var(name).ok())
    }

    /// The same with the text of `file` and an environment.
    ///
    /// # Errors
    /// The first thing that is not understood.
    pub fn parse(file: &Path, text: &str, overrides: &[String], variable: Variable) -> Result<Config> {
        let values = Values { file, all: parse::all(file, text, overrides)?, variable };
        let config = values.config()?;
        values.together(&config)?;
        Ok(config)
    }
}

struct Values<'a> {
    file: &'a Path,
    all: All,
    variable: Variable<'a>,
}

impl Values<'_> {
    fn config(&self) -> Result<Config> {
        let output_dir = self.path("train.output_dir")?.unwrap_or_default();
        Ok(Config {
            model: ModelConfig {
                path: self.path("model.path")?,
                random_init: self.flag("model.random_init")?,
                shape: self.shape()?,
            },
            data: DataConfig { path: self.path("data.path")?.unwrap_or_default(), shuffle: self.flag("data.shuffle")? },
            train: TrainConfig {
                resume_from: self.resume(&output_dir)?,
                output_dir,
                steps: self.whole("train.steps")?,
                micro_batch_size: self.size("train.micro_batch_size")?,
                global_batch_size: self.size("train.global_batch_size")?,
                seq_len: self.size("train.seq_len")?,
                lr: self.real("train.lr")?,
                min_lr: self.real("train.min_lr")?,
                warmup_steps: self.whole("train.warmup_steps")?,
                grad_clip: self.real("train.grad_clip")?,
                weight_decay: self.real("train.weight_decay")?,
                beta1: self.real("train.beta1")?,
                beta2: self.real("train.beta2")?,
                eps: self.real("train.eps")?,
                seed: self.whole("train.seed")?,
                log_every: self.whole("train.log_every")?,
                loss_chunk: self.size("train.loss_chunk")?,
                threads: self.size("train.threads")?,
                device: match self.word("train.device")?.as_str() {
                    "cpu" => Device::Cpu,
                    "cuda" => Device::Cuda,
                    _ => Device::Auto,
                },
                param_dtype: precision(&self.word("train.param_dtype")?),
                reduce_dtype: precision(&self.word("train.reduce_dtype")?).unwrap_or(Precision::F32),
                cuda_libraries: self.path("train.cuda_libraries")?,
            },
            checkpoint: CheckpointConfig {
                every: self.whole("checkpoint.every")?,
                keep: self.size("checkpoint.keep")?,
                export: self.flag("checkpoint.export")?,
                export_dtype: match self.word("checkpoint.export_dtype")?.as_str() {
                    "bf16" => ExportDtype::Bf16,
                    _ => ExportDtype::F32,
                },
                grace: self.whole("checkpoint.grace")?,
                max_restarts_without_progress: self.size("checkpoint.max_restarts_without_progress")? as u32,
            },
            comm: CommConfig {
                start_timeout: self.whole("comm.start_timeout")?,
                timeout: self.whole("comm.timeout")?,
                silence: self.whole("comm.silence")?,
                key_file: self.path("comm.key_file")?,
            },
        })
    }

    /// What no key says alone.
    fn together(&self, config: &Config) -> Result<()> {
        let model = &config.model;
        match (&model.path, &model.shape) {
            (Some(_), Some(_)) => {
                return Err(self.error(
                    "model.shape",
                    "model.path and model.shape exclude each other; keep the one that is meant",
                ));
            }
            (None, None) => {
                return Err(ConfigError(format!(
                    "{}: no model; give model.path, a Hugging Face directory, or [model.shape], the keys of a config.json",
                    self.file.display()
                )));
            }
            _ => (),
        }
        let train = &config.train;
        if train.min_lr > train.lr {
            let why = format!(
                "train.min_lr = {} is above train.lr = {}; the rate falls from lr to min_lr",
                train.min_lr, train.lr
            );
            return Err(self.error("train.min_lr", &why));
        }
        if train.warmup_steps > train.steps {
            let why = format!(
                "train.warmup_steps = {} is above train.steps = {}; lr would never be reached",
                train.warmup_steps, train.steps
            );
            return Err(self.error("train.warmup_steps", &why));
        }
        Ok(())
    }

    fn error(&self, name: &str, why: &str) -> ConfigError {
        let place = self.all.get(name).map_or_else(|| self.file.display().to_string(), |given| given.place.clone());
        ConfigError(format!("{place}: {why}"))
    }

    /// A value that a key does not take.
    fn refused(&self, name: &str, key: &Key, value: &Value) -> ConfigError {
        let written = match value {
            Value::Null => return self.error(name, &format!("{name} is empty, but must be {}", key.takes.expected())),
            Value::Array(_) => "a list".to_string(),
            Value::Object(_) => "a section".to_string(),
            value => printable(&value.to_string()),
        };
        let number = matches!(key.takes, Takes::Whole(..) | Takes::Real(..) | Takes::Positive | Takes::Fraction);
        let hint = match value {
            Value::String(text) if number && text.parse::<f64>().is_ok_and(f64::is_finite) => {
                "; write it without quotes".to_string()
            }
            Value::String(text) if number && text.contains('_') => "; write digits only".to_string(),
            Value::Number(number) if matches!(key.takes, Takes::Whole(..)) => match number.as_f64() {
                Some(real) if real.fract() == 0.0 && real.abs() < 1e15 && !number.is_u64() && !number.is_i64() => {
                    format!("; write {}", real as i64)
                }
                _ => String::new(),
            },
            Value::String(text) if key.takes == Takes::Flag && text.parse::<bool>().is_ok() => {
                "; write it without quotes".to_string()
            }
            _ => String::new(),
        };
        self.error(name, &format!("{name} = {written} must be {}{hint}", key.takes.expected()))
    }

    /// Key and value, the default's where nobody gave one; null without a default.
    fn value(&self, name: &str) -> Result<(&'static Key, Value)> {
        let (section, own) = name.split_once('.').unwrap_or_default();
        let Some(key) = keys::find(section, own) else { return Err(self.error(name, &format!("no key {name}"))) };
        match self.all.get(name) {
            Some(given) if given.value.is_null() => Err(self.refused(name, key, &Value::Null)),
            Some(given) => Ok((key, given.value.clone())),
            None if key.required => Err(ConfigError(format!(
                "{}: {name} is missing ({}); it must be {}",
                self.file.display(),
                key.what,
                key.takes.expected()
            ))),
            None => Ok((key, serde_json::from_str(key.default).unwrap_or_default())),
        }
    }

    fn whole(&self, name: &str) -> Result<u64> {
        let (key, value) = self.value(name)?;
        let Takes::Whole(least, most) = key.takes else { return Err(self.refused(name, key, &value)) };
        let number = value.as_u64().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| self.refused(name, key, &value))
    }

    fn size(&self, name: &str) -> Result<usize> {
        Ok(self.whole(name)? as usize)
    }

    fn real(&self, name: &str) -> Result<f64> {
        let (key, value) = self.value(name)?;
        let fits = |number: &f64| match key.takes {
            Takes::Real(least, most) => (least..=most).contains(number),
            Takes::Positive => *number > 0.0,
            Takes::Fraction => (0.0..1.0).contains(number),
            _ => false,
        };
        value.as_f64().filter(fits).ok_or_else(|| self.refused(name, key, &value))
    }

    fn flag(&self, name: &str) -> Result<bool> {
        let (key, value) = self.value(name)?;
        value.as_bool().ok_or_else(|| self.refused(name, key, &value))
    }

    fn word(&self, name: &str) -> Result<String> {
        let (key, value) = self.value(name)?;
        let Takes::Word(words) = key.takes else { return Err(self.refused(name, key, &value)) };
        let word = value.as_str().filter(|word| words.contains(word));
        word.map(str::to_string).ok_or_else(|| self.refused(name, key, &value))
    }

    fn shape(&self) -> Result<Option<Value>> {
        match self.value("model.shape")? {
            (_, Value::Null) => Ok(None),
            (_, Value::Object(shape)) => {
                match shape.keys().find_map(|key| Some((key, keys::meant_in_shape(key)?))) {
                    // Its default would make another model.
                    Some((key, meant)) => Err(self.error(
                        "model.shape",
                        &format!("unknown key 'model.shape.{}'; did you mean {meant}?", printable(key)),
                    )),
                    None => Ok(Some(Value::Object(shape))),
                }
            }
            (key, value) => Err(self.refused("model.shape", key, &value)),
        }
    }

    fn path(&self, name: &str) -> Result<Option<PathBuf>> {
        match self.value(name)? {
            (_, Value::Null) => Ok(None),
            (_, Value::String(text)) => self.absolute(name, &text).map(Some),
            (key, value) => Err(self.refused(name, key, &value)),
        }
    }

    fn resume(&self, output_dir: &Path) -> Result<ResumeFrom> {
        let name = "train.resume_from";
        let (key, value) = self.value(name)?;
        let step = |step: u64| ResumeFrom::Path(output_dir.join(format!("step-{step}")));
        let text = match &value {
            Value::Number(number) => return number.as_u64().map(step).ok_or_else(|| self.refused(name, key, &value)),
            Value::String(text) => text.as_str(),
            _ => return Err(self.refused(name, key, &value)),
        };
        let number = text.strip_prefix("step-").unwrap_or(text);
        match text {
            "auto" => Ok(ResumeFrom::Auto),
            "none" => Ok(ResumeFrom::Never),
            _ if number.bytes().all(|byte| byte.is_ascii_digit()) && number.parse::<u64>().is_ok() => {
                Ok(step(number.parse().unwrap_or_default()))
            }
            _ => match palingenesis::config::nearest(text, ["auto", "none"]) {
                Some(near) if !text.contains('/') => Err(self.error(
                    name,
                    &format!("{name} = \"{}\" is near \"{near}\"; write that, or ./{0} for a path", printable(text)),
                )),
                _ => self.absolute(name, text).map(ResumeFrom::Path),
            },
        }
    }

    /// A path with its variables replaced, from the root.
    fn absolute(&self, name: &str, text: &str) -> Result<PathBuf> {
        let text = self.expand(name, text)?;
        if text.trim().is_empty() || text.contains('\0') {
            return Err(self.error(name, &format!("{name} = \"{}\" is no path", printable(&text))));
        }
        std::path::absolute(&text)
            .map_err(|error| self.error(name, &format!("{name} = \"{}\" has no place: {error}", printable(&text))))
    }

    fn expand(&self, name: &str, text: &str) -> Result<String> {
        let mut expanded = String::new();
        let mut rest = text;
        if let Some(below) = text.strip_prefix('~').filter(|below| below.is_empty() || below.starts_with('/')) {
            expanded = self.variable(name, text, "HOME")?;
            rest = below;
        }
        while let Some((before, after)) = rest.split_once('$') {
            expanded.push_str(before);
            if let Some(after) = after.strip_prefix('$') {
                expanded.push('$');
                rest = after;
                continue;
            }
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let (variable, after) = match after.strip_prefix('{') {
                Some(braced) => braced.split_once('}').unwrap_or(("", braced)),
                None => after.split_at(after.find(|c| !plain(c)).unwrap_or(after.len())),
            };
            if variable.is_empty() || !variable.chars().all(plain) {
                return Err(self.error(
                    name,
                    &format!(
                        "{name} = \"{}\" has a $ without a name; write $NAME or ${{NAME}} for a variable of the \
                         environment, $$ for a $",
                        printable(text)
                    ),
                ));
            }
            expanded.push_str(&self.variable(name, text, variable)?);
            rest = after;
        }
        expanded.push_str(rest);
        Ok(expanded)
    }

    fn variable(&self, name: &str, text: &str, variable: &str) -> Result<String> {
        let why = if is_secret(variable) {
            "holds a secret, which paths do not; take another"
        } else {
            match (self.variable)(variable) {
                Some(value) if !value.is_empty() => return Ok(value),
                Some(_) => "is empty; set it, or write the path itself",
                None => "is not set on this node; export it, or write the path itself",
            }
        };
        Err(self.error(name, &format!("{name} = \"{}\": variable {variable} {why}", printable(text))))
    }
}
