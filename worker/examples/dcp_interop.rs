//! Checkpoints for tests/interop/dcp.py: writes one of a small made-up model as WORLD ranks
//! would, or reads one that PyTorch wrote, as WORLD ranks would.
//!
//!     dcp_interop write DIR WORLD
//!     dcp_interop check DIR WORLD
//!
//! Every number of ours is known: number i of tensor k has the bits (i * 2654435761 + k * 97) mod
//! 2^32, every kind of NaN among them.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, bail};
use palingenesis_worker::checkpoint::Part;
use palingenesis_worker::checkpoint::dcp;
use palingenesis_worker::shard::Division;
use serde_json::json;

#[path = "../tests/interop/torch_checkpoint.rs"]
mod torch_checkpoint;

/// Units, each one flat buffer that is divided over the ranks; the last one has empty parts.
const UNITS: [&[(&str, &[usize])]; 4] = [
    &[("model.embed_tokens.weight", &[50, 12])],
    &[
        ("model.layers.0.input_layernorm.weight", &[12]),
        ("model.layers.0.self_attn.q_proj.weight", &[24, 12]),
        ("model.layers.0.odd", &[3, 5, 7]),
        ("model.layers.0.mlp.up_proj.weight", &[1000, 301]),
    ],
    &[("model.norm.weight", &[12]), ("optimizer.state.model.norm.weight.exp_avg", &[12])],
    &[("scale", &[]), ("pair", &[2])],
];

fn number(tensor: usize, at: usize) -> f32 {
    f32::from_bits((at as u32).wrapping_mul(2_654_435_761).wrapping_add(tensor as u32 * 97))
}

/// What `rank` holds: (tensor, shape, range).
fn parts(world: usize, rank: usize) -> Vec<(usize, &'static str, &'static [usize], std::ops::Range<usize>)> {
    let mut parts = Vec::new();
    let mut tensor = 0;
    for unit in UNITS {
        let len = |shape: &[usize]| shape.iter().product::<usize>();
        let own = Division { len: unit.iter().map(|(_, shape)| len(shape)).sum(), world }.of(rank);
        let mut at = 0;
        for &(name, shape) in unit {
            let range = own.start.clamp(at, at + len(shape)) - at..own.end.clamp(at, at + len(shape)) - at;
            if !range.is_empty() {
                parts.push((tensor, name, shape, range));
            }
            at += len(shape);
            tensor += 1;
        }
    }
    parts
}

fn write(dir: &Path, world: usize) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    let objects = json!({"step": 1234, "lr": [1e-3, -0.5], "name": "é\"\n", "big": u64::MAX, "none": null, "on": true});
    let mut files = Vec::new();
    for rank in 0..world {
        let held: Vec<_> = parts(world, rank)
            .into_iter()
            .map(|(k, name, shape, range)| {
                (name, shape, range.clone(), range.map(|at| number(k, at)).collect::<Vec<_>>())
            })
            .collect();
        let parts: Vec<_> =
            held.iter().map(|(name, shape, range, data)| Part { name, shape, range: range.clone(), data }).collect();
        let own = [("train_state", &objects), ("optimizer.step", &json!(7))];
        let name = dcp::shard_name(rank as u32);
        let mut file = File::create(dir.join(&name))?;
        let shard = dcp::write_shard(&mut file, &parts, if rank == 0 { &own } else { &[] })?;
        files.push((name, shard));
    }
    let tensors: Vec<_> = UNITS.iter().copied().flatten().copied().collect();
    std::fs::write(dir.join(dcp::METADATA), dcp::metadata(&tensors, &files)?)?;
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, what, dir, world] = arguments.as_slice() else { bail!("usage: dcp_interop write|check DIR WORLD") };
    let world = world.parse().context("WORLD")?;
    match what.as_str() {
        "write" => write(Path::new(dir), world),
        "check" => {
            torch_checkpoint::check(Path::new(dir), world);
            Ok(())
        }
        _ => bail!("usage: dcp_interop write|check DIR WORLD"),
    }
}
