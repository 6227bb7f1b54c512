//! Whole trainings on the GPU's kernels, run on the processor, beside the same on the
//! processor's own: one rank and two, both precisions, tied and untied embeddings, and
//! checkpoints from one to the other.

#[path = "cuda/emulated.rs"]
mod emulated;

use std::collections::BTreeMap;

use emulated::Emulated;
use palingenesis_worker::comm::local::Local;
use palingenesis_worker::comm::{Collective, Tag};
use palingenesis_worker::engine::cuda::Cuda;
use palingenesis_worker::engine::{AdamW, Cpu, Engine, EngineError, Precision};
use palingenesis_worker::model::{Model, Spec, initial};
use palingenesis_worker::shard::{Batch, Plan, Sharded};

/// Small: each thread of each block is a coroutine here.
const SEQ: usize = 12;
const SEQUENCES: usize = 2;
const STEPS: u64 = 5;

fn spec(tied: bool, head_dim: usize) -> Spec {
    Spec::from_hf(&serde_json::json!({
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 61, "hidden_size": 24,
        "num_hidden_layers": if head_dim == 64 { 1 } else { 2 }, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim,
        "intermediate_size": 40, "tie_word_embeddings": tied, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }))
    .unwrap()
}

/// By name, what a rank keeps: where its numbers begin, and they.
type Kept = BTreeMap<String, Vec<(usize, Vec<f32>)>>;

struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    kept: Kept,
}

/// Some steps, each rank with its own sequences; the loss is the mean over all.
fn train<E: Engine, C: Collective<E>>(engine: &E, comm: &mut C, spec: &Spec, reduce: Precision) -> Trained {
    let (rank, world) = (comm.rank(), comm.world_size());
    let plan =
        Plan { sequences: SEQUENCES, sequence: SEQ * spec.hidden, rank, world, reduce, overlaps: comm.overlaps() };
    let mut sharded = Sharded::new(engine, spec.units(), plan).unwrap();
    let begun = sharded.initialise(engine, |tensor, range, numbers| {
        initial(tensor, 3, range, numbers);
        Ok::<(), EngineError>(())
    });
    begun.unwrap();
    let mut model = Model::new(engine, spec, SEQUENCES, SEQ, 7).unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let count = SEQUENCES * SEQ;
    let scale = 1.0 / (count * 2) as f32;
    let mut in_use = None;
    for step in 1..=STEPS {
        // The same four sequences of a step, by one rank in two micro-steps or by two in one.
        for micro in 0..2 / u64::from(world) {
            let share = u64::from(rank) + micro;
            let token = |i: usize| ((i as u64 + share * count as u64) * (i as u64 + 3) * 7 % 61) as u32;
            let inputs: Vec<u32> = (0..count).map(token).collect();
            let targets: Vec<u32> = (1..=count).map(token).collect();
            let (inputs, targets) = (engine.tokens(&inputs).unwrap(), engine.tokens(&targets).unwrap());
            let batch = Batch { sequences: SEQUENCES, inputs, targets };
            sharded.micro_step(engine, comm, &mut model, Some(&batch), scale, micro == 0).unwrap();
        }
        let mut sums = [sharded.take_loss(engine).unwrap() * f64::from(scale), sharded.sum_of_squares(engine).unwrap()];
        comm.sum(Tag::of("step", step as u32), &mut sums).unwrap();
        losses.push(sums[0]);
        norms.push(sums[1].sqrt());
        let how = AdamW { lr: 5e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step, grad_scale: 1.0 };
        sharded.update(engine, how).unwrap();
        // What a step needs is there after the first.
        assert_eq!(*in_use.get_or_insert(engine.memory_in_use()), engine.memory_in_use(), "step {step} allocates");
    }
    let mut kept = Kept::new();
    for part in sharded.snapshot(engine).unwrap().parts() {
        kept.entry(part.name.to_string()).or_default().push((part.range.start, part.data.to_vec()));
    }
    Trained { losses, norms, kept }
}

/// With so many ranks that are threads, each with an engine of its own.
fn at_world<E: Engine, F>(world: u32, engine: F, spec: &Spec, reduce: Precision) -> Vec<Trained>
where
    F: Fn() -> E + Sync,
{
    std::thread::scope(|scope| {
        let engine = &engine;
        let ranks: Vec<_> = Local::group(world)
            .into_iter()
            .map(|mut comm| scope.spawn(move || train(&engine(), &mut comm, spec, reduce)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn cuda(precision: Precision) -> Cuda<Emulated> {
    Cuda::new(Emulated::new().unwrap(), precision).unwrap()
}

fn differ(ours: &[f64], right: &[f64]) -> f64 {
    ours.iter().zip(right).map(|(own, right)| (own / right - 1.0).abs()).fold(0.0, f64::max)
}

#[test]
fn in_f32_the_losses_and_norms_are_the_processors() {
    if Emulated::new().is_none() {
        return;
    }
    for (tied, world) in [(true, 1), (false, 2)] {
        let spec = spec(tied, 8);
        let right = at_world(world, || Cpu::new(Some(1)), &spec, Precision::F32);
        let ours = at_world(world, || cuda(Precision::F32), &spec, Precision::F32);
        let (own, right) = (&ours[0], &right[0]);
        assert!(differ(&own.losses, &right.losses) < 2e-5, "{:?} {:?}", own.losses, right.losses);
        assert!(differ(&own.norms, &right.norms) < 2e-3, "{:?} {:?}", own.norms, right.norms);
        assert!(right.losses[4] < right.losses[0] - 0.1, "{:?}", right.losses);
    }
}

#[test]
fn in_bf16_they_are_near_and_fall() {
    if Emulated::new().is_none() {
        return;
    }
    // Heads of 64 go to the tensor cores.
    for (world, reduce, head_dim) in [(1, Precision::F32, 8), (2, Precision::F32, 64), (2, Precision::Bf16, 8)] {
        let spec = spec(true, head_dim);
        let right = at_world(world, || Cpu::new(Some(1)), &spec, Precision::F32);
        let ours = at_world(world, || cuda(Precision::Bf16), &spec, reduce);
        let (own, right) = (&ours[0], &right[0]);
        assert!(differ(&own.losses, &right.losses) < 2e-2, "{:?} {:?}", own.losses, right.losses);
        assert!(differ(&own.norms[..2], &right.norms[..2]) < 5e-2, "{:?} {:?}", own.norms, right.norms);
        assert!(own.losses[4] < own.losses[0] - 0.1, "{:?}", own.losses);
    }
}

#[test]
fn the_same_training_has_the_same_bits() {
    if Emulated::new().is_none() {
        return;
    }
    let spec = spec(false, 64);
    let run = || at_world(2, || cuda(Precision::Bf16), &spec, Precision::F32);
    for (one, other) in run().iter().zip(&run()) {
        assert_eq!(one.losses, other.losses);
        assert!(one.kept == other.kept);
    }
}

/// Masters and moments are f32 on both.
#[test]
fn what_is_kept_goes_from_one_device_to_the_other_bit_by_bit() {
    if Emulated::new().is_none() {
        return;
    }
    let spec = spec(true, 8);
    let gpu = cuda(Precision::Bf16);
    let kept = train(&gpu, &mut Local::alone(), &spec, Precision::F32).kept;
    let plan =
        Plan { sequences: 1, sequence: SEQ * spec.hidden, rank: 0, world: 1, reduce: Precision::F32, overlaps: false };
    let cpu = Cpu::new(Some(1));
    let again = through(&cpu, Sharded::new(&cpu, spec.units(), plan).unwrap(), &kept);
    assert!(again == kept);
    let back = through(&gpu, Sharded::new(&gpu, spec.units(), plan).unwrap(), &again);
    assert!(back == kept);
}

/// Loads, and gives what is kept then.
fn through<E: Engine>(engine: &E, mut sharded: Sharded<E>, kept: &Kept) -> Kept {
    let loaded = sharded.load(engine, |parts| {
        for part in parts {
            let (_, numbers) = kept[part.name].iter().find(|(start, _)| *start == part.range.start).unwrap();
            part.data.copy_from_slice(numbers);
        }
        Ok::<(), EngineError>(())
    });
    loaded.unwrap();
    let mut again = Kept::new();
    for part in sharded.snapshot(engine).unwrap().parts() {
        again.entry(part.name.to_string()).or_default().push((part.range.start, part.data.to_vec()));
    }
    again
}
