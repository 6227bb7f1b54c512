//! The gradients of whole models beside those of candle's autograd.

#[path = "../../tests/model_case/mod.rs"]
mod model_case;

use std::collections::HashMap;

use candle_core::{D, DType, Device, Tensor, Var};
use model_case::{Case, Named, assert_all_close, spec};
use palingenesis_worker::engine::IGNORED;
use palingenesis_worker::model::{Kind, Rope, Scaling, Spec};

/// The same model, written for clarity alone, in f64 with candle's gradients.
struct Oracle<'a> {
    spec: &'a Spec,
    vars: HashMap<String, Var>,
}

impl Oracle<'_> {
    fn get(&self, name: &str) -> &Tensor {
        self.vars[name].as_tensor()
    }

    fn linear(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        x.broadcast_matmul(&self.get(name).t()?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(self.spec.eps))?;
        x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(self.get(name))
    }

    /// x is batch, heads, seq, head_dim.
    fn turned(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (_, _, seq, width) = x.dims4()?;
        let theta = f64::from(self.spec.rope.theta);
        let slower = match self.spec.rope.scaling {
            Some(Scaling::Linear { factor }) => f64::from(factor),
            _ => 1.0,
        };
        let angle = |i: usize| {
            let (position, pair) = (i / (width / 2), i % (width / 2));
            position as f64 / slower * theta.powf(-2.0 * pair as f64 / width as f64)
        };
        let angles: Vec<f64> = (0..seq * width / 2).map(angle).collect();
        let angles = Tensor::from_vec(angles, (1, 1, seq, width / 2), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let (a, b) = (x.narrow(3, 0, width / 2)?, x.narrow(3, width / 2, width / 2)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 3)
    }

    fn attention(&self, x: &Tensor, prefix: &str) -> candle_core::Result<Tensor> {
        let (batch, seq, _) = x.dims3()?;
        let Spec { heads, kv_heads, head_dim, .. } = *self.spec;
        let split = |name: &str, heads: usize, norm: Option<&str>| {
            let all = self.linear(x, &format!("{prefix}{name}.weight"))?.reshape((batch, seq, heads, head_dim))?;
            let normed = match norm {
                Some(norm) if self.spec.kind == Kind::Qwen3 => self.norm(&all, &format!("{prefix}{norm}.weight"))?,
                _ => all,
            };
            normed.transpose(1, 2)?.contiguous()
        };
        let shared = |x: Tensor| {
            let parts: candle_core::Result<Vec<Tensor>> =
                (0..heads).map(|head| x.narrow(1, head / (heads / kv_heads), 1)).collect();
            Tensor::cat(&parts?, 1)
        };
        let q = self.turned(&split("q_proj", heads, Some("q_norm"))?)?;
        let k = shared(self.turned(&split("k_proj", kv_heads, Some("k_norm"))?)?)?;
        let v = shared(split("v_proj", kv_heads, None)?)?;
        let scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? / (head_dim as f64).sqrt())?;
        let hidden = |i: usize| if i % seq > i / seq { -1e30 } else { 0.0 };
        let mask = Tensor::from_vec((0..seq * seq).map(hidden).collect::<Vec<f64>>(), (1, 1, seq, seq), &Device::Cpu)?;
        let scores = scores.broadcast_add(&mask)?;
        let exp = scores.broadcast_sub(&scores.max_keepdim(3)?)?.exp()?;
        let weights = exp.broadcast_div(&exp.sum_keepdim(3)?)?;
        let out = weights.matmul(&v.contiguous()?)?.transpose(1, 2)?.reshape((batch, seq, heads * head_dim))?;
        self.linear(&out, &format!("{prefix}o_proj.weight"))
    }

    fn loss(&self, case: &Case) -> candle_core::Result<Tensor> {
        let spec = self.spec;
        let tokens = Tensor::from_slice(&case.tokens, case.tokens.len(), &Device::Cpu)?;
        let embedded = self.get("model.embed_tokens.weight").index_select(&tokens, 0)?;
        let mut x = embedded.reshape((case.batch, case.seq, spec.hidden))?;
        for layer in 0..spec.layers {
            let at = format!("model.layers.{layer}.");
            let normed = self.norm(&x, &format!("{at}input_layernorm.weight"))?;
            x = (&x + self.attention(&normed, &format!("{at}self_attn."))?)?;
            let normed = self.norm(&x, &format!("{at}post_attention_layernorm.weight"))?;
            let gate = self.linear(&normed, &format!("{at}mlp.gate_proj.weight"))?;
            let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
            let inner = (silu * self.linear(&normed, &format!("{at}mlp.up_proj.weight"))?)?;
            x = (x + self.linear(&inner, &format!("{at}mlp.down_proj.weight"))?)?;
        }
        let x = self.norm(&x, "model.norm.weight")?;
        let output = if spec.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let logits = self.linear(&x, output)?.reshape((case.targets.len(), spec.vocab))?;
        let log_sums = logits.exp()?.sum_keepdim(1)?.log()?;
        let counts: Vec<f64> = case.targets.iter().map(|t| f64::from(u8::from(*t != IGNORED))).collect();
        let targets: Vec<u32> = case.targets.iter().map(|t| if *t == IGNORED { 0 } else { *t }).collect();
        let rows = case.targets.len();
        let chosen = logits.gather(&Tensor::from_vec(targets, (rows, 1), &Device::Cpu)?, 1)?;
        let losses = ((log_sums - chosen)? * Tensor::from_vec(counts, (rows, 1), &Device::Cpu)?)?;
        losses.sum_all()? / f64::from(case.counted())
    }
}

fn candle(case: &Case) -> candle_core::Result<(f64, Named)> {
    let mut vars = HashMap::new();
    for (unit, flat) in case.units.iter().zip(&case.params) {
        for tensor in &unit.tensors {
            let values: Vec<f64> = flat[tensor.range()].iter().map(|x| f64::from(*x)).collect();
            let value = Tensor::from_vec(values, tensor.shape.as_slice(), &Device::Cpu)?;
            vars.insert(tensor.name.clone(), Var::from_tensor(&value)?);
        }
    }
    let oracle = Oracle { spec: &case.spec, vars };
    let loss = oracle.loss(case)?;
    let grads = loss.backward()?;
    let mut named = Named::new();
    for (name, var) in &oracle.vars {
        let grad = grads.get(var).unwrap_or_else(|| panic!("candle has no gradient of {name}"));
        named.insert(name.clone(), grad.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?);
    }
    Ok((loss.to_scalar()?, named))
}

fn same_as_candle(what: &str, case: &Case) {
    let (loss, grads) = case.gradients();
    let (expected_loss, expected) = candle(case).unwrap();
    assert!((loss / expected_loss - 1.0).abs() < 1e-5, "{what}: loss {loss}, candle has {expected_loss}");
    assert_all_close(what, &grads, &expected, 2e-5);
}

#[test]
fn gradients_are_candles_tied_and_untied() {
    for kind in [Kind::Llama, Kind::Qwen3] {
        for tied in [false, true] {
            same_as_candle(&format!("{kind:?}, tied: {tied}"), &Case::new(spec(kind, tied), 3, 7));
        }
    }
}

#[test]
fn gradients_are_candles_where_all_queries_share_one_key() {
    let one = Spec { kv_heads: 1, ..spec(Kind::Llama, false) };
    same_as_candle("one key-value head", &Case::new(one, 2, 9));
}

#[test]
fn gradients_are_candles_with_linear_scaling_and_another_base() {
    let rope = Rope { theta: 500.0, scaling: Some(Scaling::Linear { factor: 4.0 }) };
    same_as_candle("linear", &Case::new(Spec { rope, ..spec(Kind::Qwen3, true) }, 1, 33));
}

#[test]
fn gradients_are_candles_for_a_single_position_and_a_single_block() {
    same_as_candle("T=1", &Case::new(Spec { layers: 1, ..spec(Kind::Qwen3, false) }, 3, 1));
}
