//! What a training's metrics.jsonl says: its losses beside another's, and its speed as tokens
//! per second, as a part of what the GPU could do, and beside PyTorch's.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use palingenesis_worker::config::Config;
use palingenesis_worker::model::Spec;
use serde_json::Value;

use crate::row::{Row, State};

/// bf16, dense, as NVIDIA's data sheets have it; the first name that is part of the GPU's. H100
/// PCIe and NVL and H200 NVL are slower than what is soldered on.
const PEAKS: [(&[&str], f64); 9] = [
    (&["GB200"], 2500e12),
    (&["B200"], 2250e12),
    (&["H200", "NVL"], 836e12),
    (&["H200"], 989e12),
    (&["H100", "NVL"], 835e12),
    (&["H100", "PCIe"], 756e12),
    (&["H100"], 989e12),
    (&["A100"], 312e12),
    (&["A800"], 312e12),
];

/// FLOP/s of a GPU of this name in bf16.
pub fn peak(name: &str) -> Option<f64> {
    PEAKS.iter().find(|(words, _)| words.iter().all(|word| name.contains(word))).map(|(_, peak)| *peak)
}

/// What a token costs forward and backward, by torchtitan's rule
/// (<https://github.com/pytorch/torchtitan/blob/01c01c88fe7a58a250e7adf6ddc3b7a3857597f4/torchtitan/models/utils.py>,
/// `get_nparams_and_active_nparams` and `quadratic_attention_flops_per_token`):
/// six for each parameter, embeddings left out unless they are the output projection, too, and
/// 12 · layers · heads · head dimension · seq for attention, of which no half is left out
/// though it is causal. What is computed again in the backward pass is not counted.
pub fn flops_per_token(spec: &Spec, seq: usize) -> f64 {
    let looked_up = if spec.tied { 0 } else { spec.vocab * spec.hidden };
    let parameters = spec.parameters() as f64 - looked_up as f64;
    6.0 * parameters + 12.0 * (spec.layers * spec.heads * spec.head_dim * seq) as f64
}

/// Events "step" of a metrics.jsonl by step; of a step told twice the later.
pub fn steps(metrics: &Path) -> Result<BTreeMap<u64, Value>, String> {
    let text = fs::read_to_string(metrics).map_err(|error| format!("{}: {error}", metrics.display()))?;
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let steps =
        events.filter(|event| event["event"] == "step").filter_map(|event| Some((event["step"].as_u64()?, event)));
    Ok(steps.collect())
}

/// One training's losses beside another's, which has at least its steps.
pub fn compare(what: &str, one: &Path, other: &Path, expected: u64, bar: f64) -> Row {
    let told = match (steps(one), steps(other)) {
        (Ok(one), Ok(other)) => (one, other),
        (Err(why), _) | (_, Err(why)) => return Row::failed(what, why),
    };
    let (one, other) = told;
    let (mut worst, mut at, mut sum) = (0.0, 0, 0.0);
    for (step, event) in &one {
        let losses = (event["loss"].as_f64(), other.get(step).and_then(|event| event["loss"].as_f64()));
        let (Some(ours), Some(right)) = losses else {
            return Row::failed(what, format!("step {step} has no loss in one of the trainings"));
        };
        let error = ((ours - right) / right).abs();
        let error = if error.is_nan() { f64::INFINITY } else { error };
        sum += error;
        if error > worst {
            (worst, at) = (error, *step);
        }
    }
    if one.len() as u64 != expected {
        return Row::failed(what, format!("{} steps are told, not {expected}", one.len()));
    }
    let last = one.last_key_value().and_then(|(_, event)| event["loss"].as_f64()).unwrap_or(f64::NAN);
    let mean = sum / one.len().max(1) as f64;
    let value = format!("loss {last:.4} at the end; apart by {worst:.1e} at step {at}, {mean:.1e} on average");
    Row::new(what, value, format!("{bar:.0e} at each step"), State::of(worst <= bar))
}

/// Steps before the speed counts: memory grows, kernels are loaded.
const WARM: u64 = 4;

/// Speed of a training whose every step is told, on the GPU of this name.
pub fn speed(config: &Path, metrics: &Path, gpu: &str, torch: Option<&Path>) -> Vec<Row> {
    measured(config, metrics, gpu, torch).unwrap_or_else(|why| vec![Row::failed("speed", why)])
}

fn measured(config: &Path, metrics: &Path, gpu: &str, torch: Option<&Path>) -> Result<Vec<Row>, String> {
    let config = Config::read(config, &[]).map_err(|error| error.to_string())?;
    let shape = config.model.shape.ok_or("the configuration has no model.shape")?;
    let spec = Spec::from_hf(&shape).map_err(|error| error.to_string())?;
    let train = &config.train;
    let steps = steps(metrics)?;
    let number = |event: &Value, key: &str| event[key].as_f64();
    let mut speeds: Vec<f64> = steps.range(WARM + 1..).filter_map(|(_, event)| number(event, "tokens_per_s")).collect();
    if speeds.len() < 3 {
        return Err(format!("only {} steps were done in time, {} are needed", steps.len(), WARM + 3));
    }
    let tokens = median(&mut speeds);
    let what = format!(
        "{:.0} M parameters, {} x {} tokens a step",
        spec.parameters() as f64 / 1e6,
        train.global_batch_size,
        train.seq_len
    );
    let mut rows = Vec::new();
    let first = steps.first_key_value().and_then(|(_, event)| number(event, "loss")).unwrap_or(f64::NAN);
    // A model that knows nothing yet finds all tokens alike.
    let uniform = (spec.vocab as f64).ln();
    rows.push(Row::new(
        format!("first loss, {what}"),
        format!("{first:.3}"),
        format!("{uniform:.3} (ln {}) within 0.5", spec.vocab),
        State::of((first - uniform).abs() <= 0.5),
    ));
    rows.push(Row::new(
        format!("speed, {what}"),
        format!(
            "{tokens:.0} tokens/s, {:.3} s a step, the median of {}",
            (train.global_batch_size * train.seq_len) as f64 / tokens,
            speeds.len()
        ),
        "-",
        State::Ok,
    ));
    let flops = flops_per_token(&spec, train.seq_len) * tokens;
    let peak = peak(gpu)
        .map_or("-".to_string(), |peak| format!("{:.1} % of {:.0} TFLOP/s", 100.0 * flops / peak, peak / 1e12));
    rows.push(Row::new(
        "MFU by torchtitan's rule",
        format!("{peak} ({:.0} TFLOP/s; {gpu})", flops / 1e12),
        "-",
        State::Ok,
    ));
    let memory = steps.values().filter_map(|event| number(event, "device_memory_bytes")).fold(0.0, f64::max);
    rows.push(Row::new(
        "the GPU's memory in use, at most",
        if memory > 0.0 { format!("{:.1} GiB", memory / f64::from(1 << 30)) } else { "not told: not a GPU".into() },
        "-",
        if memory > 0.0 { State::Ok } else { State::Skipped },
    ));
    if let Some(torch) = torch {
        rows.push(beside(tokens, torch));
    }
    Ok(rows)
}

/// Beside what step.py printed.
fn beside(tokens: f64, torch: &Path) -> Row {
    const WHAT: &str = "speed beside PyTorch's";
    let text = match fs::read_to_string(torch) {
        Ok(text) => text,
        Err(error) => return Row::failed(WHAT, format!("{}: {error}", torch.display())),
    };
    let Some(theirs) = text.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok()) else {
        return Row::failed(WHAT, "PyTorch told no speed");
    };
    let Some(speed) = theirs["tokens_per_s"].as_f64().filter(|speed| *speed > 0.0) else {
        return Row::failed(WHAT, format!("PyTorch told no speed: {theirs}"));
    };
    let memory = theirs["memory_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 30);
    let text = |key: &str| theirs[key].as_str().unwrap_or("?").to_string();
    Row::new(
        WHAT,
        format!(
            "{:.2} times as fast as {speed:.0} tokens/s of torch {}, {}, which takes {memory:.1} GiB",
            tokens / speed,
            text("torch"),
            text("model")
        ),
        "-",
        State::Ok,
    )
}

fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => numbers[count / 2],
        count => f64::midpoint(numbers[count / 2 - 1], numbers[count / 2]),
    }
}
