//! The collectives of a group of one rank: numbers come out as they went in, after what the
//! engine was told before, and before what it is told after.

use palingenesis_worker::comm::{Collective, Ongoing, Tag};
use palingenesis_worker::engine::{Engine, Precision};
use palingenesis_worker::shard::{Result, ShardError};

use crate::gpu::GroupWork;
use crate::ops::{Random, error, name, rounded};
use crate::row::{Row, State};

/// Of all collectives; gives a row for each.
pub struct Collectives;

impl GroupWork for Collectives {
    type Out = Vec<Row>;

    fn on<E: Engine, C: Collective<E>>(self, engine: &E, comm: &mut C) -> Vec<Row> {
        let mut precisions = vec![Precision::F32];
        if engine.compute() != Precision::F32 {
            precisions.push(engine.compute());
        }
        let mut rows = Vec::new();
        for precision in precisions {
            for what in ["all_gather", "reduce_scatter", "all_reduce"] {
                let label = format!("{what} of one rank, {}", name(precision));
                rows.push(match once(engine, comm, what, precision) {
                    Ok(error) => Row::new(label, format!("{error:.1e}"), "0", State::of(error == 0.0)),
                    Err(error) => Row::failed(label, error),
                });
            }
        }
        let said = comm.exchange(Tag::of("check", 0), b"here").and_then(|said| {
            comm.barrier(Tag::of("check", 1))?;
            Ok(said == [b"here"])
        });
        rows.push(match said {
            Ok(same) => Row::new(
                "exchange and barrier beside them",
                if same { "as sent" } else { "other bytes" },
                "as sent",
                State::of(same),
            ),
            Err(error) => Row::failed("exchange and barrier beside them", error),
        });
        rows
    }
}

/// The largest error, of several lengths.
fn once<E: Engine, C: Collective<E>>(engine: &E, comm: &mut C, what: &str, precision: Precision) -> Result<f64> {
    let mut most: f64 = 0.0;
    for len in [1, 97, 4096, 10_000_000] {
        let numbers = Random(len as u64).vec(len, 1.0);
        let mut buffer = engine.zeros(len, precision)?;
        let mut after = engine.zeros(len, precision)?;
        engine.upload(engine.view_mut(&mut buffer, 0..len), &numbers)?;
        // What an operation must come after, and before.
        engine.copy(engine.view_mut(&mut after, 0..len), engine.view(&buffer, 0..len))?;
        engine.fill(engine.view_mut(&mut buffer, 0..len), 0.0)?;
        engine.copy(engine.view_mut(&mut buffer, 0..len), engine.view(&after, 0..len))?;
        engine.fill(engine.view_mut(&mut after, 0..len), f32::NAN)?;
        let full = engine.view_mut(&mut buffer, 0..len);
        let tag = Tag::of("check", 2);
        let ongoing: Ongoing = match what {
            "all_gather" => comm.all_gather(engine, tag, full)?,
            "reduce_scatter" => comm.reduce_scatter(engine, tag, full)?,
            _ => comm.all_reduce(engine, tag, full)?,
        };
        comm.finish(engine, ongoing)?;
        engine.copy(engine.view_mut(&mut after, 0..len), engine.view(&buffer, 0..len))?;
        engine.fill(engine.view_mut(&mut buffer, 0..len), f32::NAN)?;
        let mut got = vec![0.0; len];
        engine.download(engine.view(&after, 0..len), &mut got).map_err(ShardError::from)?;
        most = most.max(error(&got, &rounded(&numbers, precision)));
    }
    Ok(most)
}
