//! Logits, loss and gradients of tiny models against transformers (fixtures made by
//! fixtures/model/generate.py) and against finite differences. oracle/tests/model.rs has
//! candle's autograd.

mod model_case;

use std::path::PathBuf;

use model_case::{Case, Named, Numbers, assert_all_close, spec};
use palingenesis_worker::engine::{Cpu, Engine, IGNORED};
use palingenesis_worker::model::{Kind, Model, Spec};
use safetensors::SafeTensors;
use serde_json::Value;

// Against transformers.

fn fixture(model: &str, file: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model").join(model).join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn words<T>(tensors: &SafeTensors, name: &str, number: fn([u8; 4]) -> T) -> Vec<T> {
    let tensor = tensors.tensor(name).unwrap();
    tensor.data().chunks_exact(4).map(|four| number(four.try_into().unwrap())).collect()
}

fn same_as_transformers(name: &str) {
    let config: Value = serde_json::from_slice(&fixture(name, "config.json")).unwrap();
    let spec = Spec::from_hf(&config).unwrap();
    let (weights, expected) = (fixture(name, "model.safetensors"), fixture(name, "expected.safetensors"));
    let (weights, expected) =
        (SafeTensors::deserialize(&weights).unwrap(), SafeTensors::deserialize(&expected).unwrap());
    let shape = expected.tensor("logits").unwrap().shape().to_vec();
    let mut case = Case::new(spec, shape[0], shape[1]);
    case.tokens = words(&expected, "tokens", u32::from_le_bytes);
    case.targets = words(&expected, "targets", i32::from_le_bytes)
        .into_iter()
        .map(|target| u32::try_from(target).unwrap_or(IGNORED))
        .collect();
    let mut read = 0;
    for (unit, flat) in case.units.iter().zip(&mut case.params) {
        for tensor in &unit.tensors {
            assert_eq!(weights.tensor(&tensor.name).unwrap().shape(), tensor.shape, "{}", tensor.name);
            flat[tensor.range()].copy_from_slice(&words(&weights, &tensor.name, f32::from_le_bytes));
            read += 1;
        }
    }
    assert_eq!(read, weights.len(), "every tensor of the file has a place");

    let (loss, grads) = case.gradients();
    let expected_loss = f64::from(words(&expected, "loss", f32::from_le_bytes)[0]);
    assert!((loss / expected_loss - 1.0).abs() < 1e-6, "{name}: loss {loss}, transformers has {expected_loss}");
    let named = expected.names().into_iter().filter_map(|name| name.strip_prefix("grad."));
    let expected_grads: Named =
        named.map(|name| (name.to_string(), words(&expected, &format!("grad.{name}"), f32::from_le_bytes))).collect();
    assert_all_close(name, &grads, &expected_grads, 1e-5);

    let logits = words(&expected, "logits", f32::from_le_bytes);
    let log_softmax = logits.chunks_exact(case.spec.vocab).flat_map(|row| {
        let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        row.iter().map(move |x| f64::from(*x) - sum.ln())
    });
    for (at, (found, expected)) in case.log_probabilities().iter().zip(log_softmax).enumerate() {
        assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{name} [{at}]: {found}, not {expected}");
    }
}

#[test]
fn qwen3_computes_what_transformers_computes() {
    same_as_transformers("qwen3");
}

#[test]
fn llama_with_llama3_scaling_computes_what_transformers_computes() {
    same_as_transformers("llama3");
}

/// fixtures/model/generate.py --check has transformers read these files.
#[test]
fn the_config_json_that_is_written_is_the_one_that_transformers_was_shown() {
    for name in ["qwen3", "llama3"] {
        let spec = Spec::from_hf(&serde_json::from_slice(&fixture(name, "config.json")).unwrap()).unwrap();
        let shown: Value = serde_json::from_slice(&fixture(name, "ours.json")).unwrap();
        assert_eq!(spec.to_hf(), shown, "{name}: {:#}", spec.to_hf());
        assert_eq!(Spec::from_hf(&shown), Ok(spec));
    }
}

// Against itself.

#[test]
fn gradients_are_the_loss_s_finite_differences() {
    for kind in [Kind::Llama, Kind::Qwen3] {
        let mut case = Case::new(spec(kind, kind == Kind::Qwen3), 2, 5);
        let (_, grads) = case.gradients();
        let mut numbers = Numbers(11);
        let units = case.units.clone();
        for (at, tensor) in units.iter().enumerate().flat_map(|(at, unit)| unit.tensors.iter().map(move |t| (at, t))) {
            let direction: Vec<f32> = (0..tensor.len()).map(|_| numbers.uniform().signum()).collect();
            let slope: f32 = grads[&tensor.name].iter().zip(&direction).map(|(g, d)| g * d).sum();
            let before = case.params[at].clone();
            let step = 2e-3;
            let mut shifted = |by: f32| {
                let to = &mut case.params[at][tensor.range()];
                to.iter_mut().zip(&before[tensor.range()]).zip(&direction).for_each(|((to, x), d)| *to = x + by * d);
                case.loss()
            };
            // Richardson: what is left is of the fourth order.
            let half = (shifted(step / 2.0) - shifted(-step / 2.0)) / f64::from(step);
            let whole = (shifted(step) - shifted(-step)) / f64::from(2.0 * step);
            let measured = ((4.0 * half - whole) / 3.0) as f32;
            case.params[at] = before;
            let off = (measured - slope).abs();
            assert!(off < 2e-3 * slope.abs().max(0.5), "{kind:?} {}: {slope}, measured {measured}", tensor.name);
        }
    }
}

#[test]
fn the_loss_s_chunks_change_nothing_but_rounding() {
    for tied in [false, true] {
        let mut case = Case::new(spec(Kind::Qwen3, tied), 3, 7);
        let (loss, grads) = case.gradients();
        for chunk in [1, 20, 21, 22, 1000, 0] {
            case.chunk = chunk;
            let (again, other) = case.gradients();
            assert!((again / loss - 1.0).abs() < 1e-6, "{chunk}: {again}, not {loss}");
            assert_all_close(&format!("chunks of {chunk}"), &other, &grads, 1e-5);
            assert!((case.loss() / loss - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn gradients_are_added_and_a_buffer_s_padding_is_not_touched() {
    let mut case = Case::new(spec(Kind::Qwen3, true), 2, 5);
    let (_, once) = case.gradients();
    let mut grads = case.zeros();
    grads.iter_mut().for_each(|flat| flat.extend([9.0; 3]));
    case.params.iter_mut().for_each(|flat| flat.extend([f32::NAN; 3]));
    case.backward(case.batch, &mut grads);
    case.backward(case.batch, &mut grads);
    assert!(grads.iter().all(|flat| flat[flat.len() - 3..] == [9.0; 3]));
    let twice = case.named(&grads).into_iter().map(|(name, grad)| (name, grad.iter().map(|x| x / 2.0).collect()));
    assert_all_close("twice", &twice.collect(), &once, 1e-6);
}

#[test]
fn a_smaller_micro_batch_in_larger_buffers_is_the_same() {
    let case = Case::new(spec(Kind::Llama, false), 2, 5);
    let (loss, once) = case.gradients();
    let mut grads = case.zeros();
    assert_eq!(case.backward(5, &mut grads), loss);
    assert_all_close("in larger buffers", &case.named(&grads), &once, 0.0);
}

#[test]
fn sequences_whose_targets_do_not_count_change_no_gradient() {
    let mut case = Case::new(spec(Kind::Qwen3, false), 2, 6);
    case.targets[6..].fill(IGNORED);
    let (loss, padded) = case.gradients();
    (case.batch, case.tokens, case.targets) = (1, case.tokens[..6].to_vec(), case.targets[..6].to_vec());
    let (alone, grads) = case.gradients();
    assert!((loss / alone - 1.0).abs() < 1e-6);
    assert_all_close("padded", &padded, &grads, 1e-5);
}

#[test]
fn buffers_that_no_machine_has_are_an_error() {
    let huge = spec(Kind::Llama, false);
    for (batch, seq) in [(usize::MAX, 2), (usize::MAX / 64, 3)] {
        let error = Model::<Cpu>::new(&Cpu::default(), &huge, batch, seq, 1).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|text| text.contains("lower micro_batch_size or seq_len")), "{error:?}");
    }
}

#[test]
fn a_step_against_the_gradient_lowers_the_loss() {
    let mut case = Case::new(spec(Kind::Qwen3, true), 2, 8);
    let mut grads = case.zeros();
    let before = case.backward(case.batch, &mut grads);
    let mut squares = 0.0;
    grads.iter().for_each(|grads| case.engine.sum_of_squares(&mut squares, grads).unwrap());
    let rate = 1e-3 / squares.sqrt();
    for (params, grads) in case.params.iter_mut().zip(&grads) {
        params.iter_mut().zip(grads).for_each(|(p, g)| *p -= rate as f32 * g);
    }
    let (fallen, foreseen) = (before - case.loss(), rate * squares);
    assert!((fallen / foreseen - 1.0).abs() < 0.05, "fell by {fallen}, foreseen {foreseen}");
}
