//! Each rank's part of every unit, ZeRO-3: gathered before use, given back after; gradients
//! are summed into the part they belong to. What a rank keeps of every parameter is the
//! master copy, AdamW's two moments and the gradient; whole units exist one at a time.
//! Nothing here knows of files, tokens on disk or schedules.

mod optimizer;
mod step;

use std::borrow::Cow;
use std::ops::Range;
use std::time::{Duration, Instant};

pub use step::Batch;

use crate::checkpoint::{Part, PartMut};
use crate::comm::{Collective, CommError, Ongoing, Tag};
use crate::engine::{Engine, EngineError, Precision};
use crate::model::{Tensor, Unit};

/// How a unit's flat buffer is divided: into world_size parts of equal length, the last
/// ones shorter or empty; what is missing is padding in memory, never on disk. A part is a
/// multiple of [`Division::STEP`] numbers, so that each begins where a device reads fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Numbers in the unit.
    pub len: usize,
    /// Ranks.
    pub world: usize,
}

impl Division {
    /// In bf16 a GPU's cache line, 128 bytes.
    pub const STEP: usize = 64;

    /// Of each part, with padding.
    #[must_use]
    pub fn part(&self) -> usize {
        self.len.div_ceil(self.world.max(1)).next_multiple_of(Division::STEP)
    }

    /// Of the buffer into which all parts are gathered.
    #[must_use]
    pub fn padded(&self) -> usize {
        self.part() * self.world
    }

    /// What a rank holds of the unit, without padding; may be empty.
    #[must_use]
    pub fn of(&self, rank: usize) -> Range<usize> {
        let part = self.part();
        (rank * part).min(self.len)..((rank + 1) * part).min(self.len)
    }
}

/// Why a step was not computed.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// Another rank, or the way to it.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// This rank's device.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A result of what needs all ranks.
pub type Result<T> = std::result::Result<T, ShardError>;

/// What a rank keeps of one unit: each buffer is `division.part()` long, in f32.
struct Kept<E: Engine> {
    unit: Unit,
    division: Division,
    own: Range<usize>,
    master: E::Buffer,
    first_moment: E::Buffer,
    second_moment: E::Buffer,
    grad: E::Buffer,
}

/// A buffer for one whole unit's parameters, and which one it holds.
struct Whole<E: Engine> {
    buffer: E::Buffer,
    holds: Option<usize>,
    /// The gathering, if it is not finished.
    ongoing: Option<Ongoing>,
}

/// A buffer for one whole unit's gradients.
struct Grads<E: Engine> {
    buffer: E::Buffer,
    /// Which unit's are being summed up, and whether they replace the last step's.
    reducing: Option<(usize, bool, Ongoing)>,
}

/// A model's parameters, gradients and optimizer, divided over the ranks.
///
/// Gathered is only what is not there already: the last block forward is the first
/// backward, and with a tied embedding the first unit stays for a whole step. Whole
/// parameters are held once for a block, and beside it the embedding or the head. Where
/// collectives go on beside the computation, two blocks are held: the next is gathered
/// while one is computed, and the gradients of one are summed up while the next are computed.
pub struct Sharded<E: Engine> {
    units: Vec<Kept<E>>,
    rank: usize,
    world: usize,
    /// A master copy is what is computed with: one rank, the same precision.
    direct: bool,
    /// Gradients are computed where they are kept: one rank, f32.
    grads_direct: bool,
    root: Whole<E>,
    blocks: Vec<Whole<E>>,
    root_grads: Grads<E>,
    block_grads: Vec<Grads<E>>,
    activations: step::Activations<E>,
    loss: E::Sum,
    squares: E::Sum,
    waited: Duration,
}

/// What a model is divided for.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Sequences in a micro-batch, at most.
    pub sequences: usize,
    /// Numbers of one sequence: seq · hidden.
    pub sequence: usize,
    /// This rank.
    pub rank: u32,
    /// Of so many.
    pub world: u32,
    /// What gradients are computed and summed over the ranks in.
    pub reduce: Precision,
    /// See [`Collective::overlaps`].
    pub overlaps: bool,
}

impl<E: Engine> Sharded<E> {
    /// All zeros: [`Sharded::initialise`] or [`Sharded::load`] fills it.
    ///
    /// # Errors
    /// No memory.
    pub fn new(engine: &E, units: Vec<Unit>, plan: Plan) -> Result<Sharded<E>> {
        let (rank, world) = (plan.rank as usize, plan.world as usize);
        let compute = engine.compute();
        let count = units.iter().filter(|unit| is_block(unit)).count();
        let direct = world == 1 && compute == Precision::F32;
        let grads_direct = world == 1 && plan.reduce == Precision::F32;
        let longest = |block: bool| {
            let lengths = units.iter().filter(|unit| is_block(unit) == block);
            lengths.map(|unit| Division { len: unit.len(), world }.padded()).max().unwrap_or(0)
        };
        let (root, block) = (longest(false), longest(true));
        let whole = |len: usize| -> Result<Whole<E>> {
            let buffer = engine.zeros(if direct { 0 } else { len }, compute)?;
            Ok(Whole { buffer, holds: None, ongoing: None })
        };
        let grads = |len: usize| -> Result<Grads<E>> {
            let buffer = engine.zeros(if grads_direct { 0 } else { len }, plan.reduce)?;
            Ok(Grads { buffer, reducing: None })
        };
        let beside = if plan.overlaps && world > 1 { 2 } else { 1 };
        let (root, blocks) = (whole(root)?, (0..beside).map(|_| whole(block)).collect::<Result<Vec<_>>>()?);
        let root_grads = grads(longest(false))?;
        let block_grads = (0..beside).map(|_| grads(block)).collect::<Result<Vec<_>>>()?;
        let units = units
            .into_iter()
            .map(|unit| {
                let division = Division { len: unit.len(), world };
                let zeros = || engine.zeros(division.part(), Precision::F32);
                Ok(Kept {
                    own: division.of(rank),
                    master: zeros()?,
                    first_moment: zeros()?,
                    second_moment: zeros()?,
                    grad: zeros()?,
                    division,
                    unit,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Sharded {
            units,
            rank,
            world,
            direct,
            grads_direct,
            root,
            blocks,
            root_grads,
            block_grads,
            activations: step::Activations::new(engine, count, plan.sequences, plan.sequence)?,
            loss: engine.sum()?,
            squares: engine.sum()?,
            waited: Duration::ZERO,
        })
    }

    /// What was gathered is no longer what the ranks keep.
    fn forget(&mut self) {
        self.root.holds = None;
        self.blocks.iter_mut().for_each(|block| block.holds = None);
    }

    /// Fills this rank's parts with first values: `value(tensor, range, numbers)` gives
    /// those of `range` of a tensor. Moments become zero.
    ///
    /// # Errors
    /// `value`'s, or the device's.
    pub fn initialise<X: From<EngineError>>(
        &mut self,
        engine: &E,
        mut value: impl FnMut(&Tensor, Range<usize>, &mut [f32]) -> std::result::Result<(), X>,
    ) -> std::result::Result<(), X> {
        self.forget();
        for kept in &mut self.units {
            engine.fill(engine.view_mut(&mut kept.first_moment, 0..kept.own.len()), 0.0)?;
            engine.fill(engine.view_mut(&mut kept.second_moment, 0..kept.own.len()), 0.0)?;
            let master = engine.view_mut(&mut kept.master, 0..kept.own.len());
            let pieces: Vec<_> = pieces(&kept.unit, &kept.own).collect();
            engine.with_host(vec![master], |numbers| {
                let [numbers] = numbers else { return Ok(()) };
                pieces.into_iter().try_for_each(|piece| value(piece.tensor, piece.range, &mut numbers[piece.at]))
            })??;
        }
        Ok(())
    }

    /// What this rank keeps, where the host can read it.
    ///
    /// # Errors
    /// The device's.
    pub fn snapshot<'a>(&'a self, engine: &E) -> Result<Snapshot<'a>> {
        let host = |buffer: &'a E::Buffer, kept: &Kept<E>| engine.host(engine.view(buffer, 0..kept.own.len()));
        let units = self.units.iter().map(|kept| {
            let numbers =
                [host(&kept.master, kept)?, host(&kept.first_moment, kept)?, host(&kept.second_moment, kept)?];
            Ok((&kept.unit, kept.own.clone(), numbers))
        });
        let units = units.collect::<Result<Vec<_>>>()?;
        Ok(Snapshot { names: units.iter().flat_map(|(unit, ..)| unit.tensors.iter().map(names)).collect(), units })
    }

    /// Lets `read` fill this rank's parts: parameters and moments, as in
    /// [`Snapshot::parts`]. After an error they hold anything.
    ///
    /// # Errors
    /// `read`'s, or the device's.
    pub fn load<X: From<EngineError>>(
        &mut self,
        engine: &E,
        read: impl FnOnce(&mut [PartMut<'_>]) -> std::result::Result<(), X>,
    ) -> std::result::Result<(), X> {
        self.forget();
        let names: Vec<[String; 3]> = self.units.iter().flat_map(|kept| kept.unit.tensors.iter().map(names)).collect();
        let (mut views, mut whats) = (Vec::new(), Vec::new());
        for kept in &mut self.units {
            let own = 0..kept.own.len();
            views.push(engine.view_mut(&mut kept.master, own.clone()));
            views.push(engine.view_mut(&mut kept.first_moment, own.clone()));
            views.push(engine.view_mut(&mut kept.second_moment, own));
            whats.push((&kept.unit, &kept.own));
        }
        engine.with_host(views, |numbers| {
            let mut parts = Vec::new();
            let mut before = 0;
            for ((unit, own), numbers) in whats.into_iter().zip(numbers.chunks_exact_mut(3)) {
                for (which, numbers) in numbers.iter_mut().enumerate() {
                    let mut rest = &mut **numbers;
                    for Piece { index, tensor, range, .. } in pieces(unit, own) {
                        let (data, after) = rest.split_at_mut(range.len());
                        rest = after;
                        let name = &names[before + index][which];
                        parts.push(PartMut { name, shape: &tensor.shape, range, data });
                    }
                }
                before += unit.tensors.len();
            }
            read(&mut parts)
        })?
    }

    /// Gathers unit after unit and shows each rank its tensors, whole, in their order:
    /// the way to an export. Never more than one unit is held.
    ///
    /// # Errors
    /// `show`'s, another rank's, or the device's.
    pub fn each_tensor<C: Collective<E>, X: From<ShardError>>(
        &mut self,
        engine: &E,
        comm: &mut C,
        mut show: impl FnMut(&Tensor, &[f32]) -> std::result::Result<(), X>,
    ) -> std::result::Result<(), X> {
        for index in 0..self.units.len() {
            self.gather(engine, comm, index)?;
            let tensors = self.units[index].unit.tensors.clone();
            let whole = engine.host(self.whole(engine, index)).map_err(ShardError::from)?;
            tensors.iter().try_for_each(|tensor| show(tensor, &whole[tensor.range()]))?;
        }
        Ok(())
    }

    /// The units, in their order.
    pub fn units(&self) -> impl Iterator<Item = &Unit> {
        self.units.iter().map(|kept| &kept.unit)
    }

    /// Numbers in all parameters together.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.units.iter().map(|kept| kept.unit.len()).sum()
    }

    /// The time spent in collectives since this was asked last.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Begins to bring a whole unit together, unless it is there.
    fn begin_gather<C: Collective<E>>(&mut self, engine: &E, comm: &mut C, index: usize) -> Result<()> {
        let kept = &self.units[index];
        let whole = if is_block(&kept.unit) { of(&mut self.blocks, index) } else { &mut self.root };
        if self.direct || whole.holds == Some(index) {
            return Ok(());
        }
        assert!(whole.ongoing.is_none(), "{} would be gathered over another unit", tag(&kept.unit));
        whole.holds = None;
        let part = kept.division.part();
        let own = engine.view_mut(&mut whole.buffer, self.rank * part..(self.rank + 1) * part);
        engine.copy(own, engine.view(&kept.master, 0..part))?;
        if self.world > 1 {
            let since = Instant::now();
            let full = engine.view_mut(&mut whole.buffer, 0..kept.division.padded());
            whole.ongoing = Some(comm.all_gather(engine, tag(&kept.unit), full)?);
            self.waited += since.elapsed();
        }
        whole.holds = Some(index);
        Ok(())
    }

    /// Brings a whole unit together, unless it is there.
    fn gather<C: Collective<E>>(&mut self, engine: &E, comm: &mut C, index: usize) -> Result<()> {
        self.begin_gather(engine, comm, index)?;
        let whole = if is_block(&self.units[index].unit) { of(&mut self.blocks, index) } else { &mut self.root };
        if let Some(ongoing) = whole.ongoing.take() {
            let since = Instant::now();
            comm.finish(engine, ongoing)?;
            self.waited += since.elapsed();
        }
        Ok(())
    }

    /// A unit that was gathered.
    fn whole<'a>(&'a mut self, engine: &E, index: usize) -> E::View<'a> {
        self.at(engine, index).params
    }

    /// Sets a unit's whole gradients to zero, padding too.
    fn clear<C: Collective<E>>(&mut self, engine: &E, comm: &mut C, index: usize, first: bool) -> Result<()> {
        self.add_reduced(engine, comm, index)?;
        let kept = &mut self.units[index];
        let padded = kept.division.padded();
        let grads = if self.grads_direct {
            // They are the sum of all micro-batches.
            if !first {
                return Ok(());
            }
            &mut kept.grad
        } else if is_block(&kept.unit) {
            &mut of(&mut self.block_grads, index).buffer
        } else {
            &mut self.root_grads.buffer
        };
        Ok(engine.fill(engine.view_mut(grads, 0..padded), 0.0)?)
    }

    /// Begins to sum a unit's gradients over the ranks. `first`: they replace those of the
    /// last step.
    fn reduce<C: Collective<E>>(&mut self, engine: &E, comm: &mut C, index: usize, first: bool) -> Result<()> {
        if self.grads_direct {
            return Ok(());
        }
        let kept = &self.units[index];
        let grads = if is_block(&kept.unit) { of(&mut self.block_grads, index) } else { &mut self.root_grads };
        let full = engine.view_mut(&mut grads.buffer, 0..kept.division.padded());
        let since = Instant::now();
        let ongoing = comm.reduce_scatter(engine, tag(&kept.unit), full)?;
        self.waited += since.elapsed();
        grads.reducing = Some((index, first, ongoing));
        if comm.overlaps() { Ok(()) } else { self.add_reduced(engine, comm, index) }
    }

    /// Adds what was summed up in the buffer that this unit's gradients take.
    fn add_reduced<C: Collective<E>>(&mut self, engine: &E, comm: &mut C, index: usize) -> Result<()> {
        let block = is_block(&self.units[index].unit);
        let grads = if block { of(&mut self.block_grads, index) } else { &mut self.root_grads };
        let Some((index, first, ongoing)) = grads.reducing.take() else { return Ok(()) };
        let since = Instant::now();
        comm.finish(engine, ongoing)?;
        self.waited += since.elapsed();
        let kept = &mut self.units[index];
        let part = kept.division.part();
        let sum = engine.view(&grads.buffer, self.rank * part..(self.rank + 1) * part);
        let to = engine.view_mut(&mut kept.grad, 0..part);
        if first {
            engine.copy(to, sum)?
        } else {
            engine.add(to, sum)?
        };
        Ok(())
    }
}

/// Neighbours among the blocks have different buffers, where there are two.
fn of<T>(buffers: &mut [T], index: usize) -> &mut T {
    let count = buffers.len();
    &mut buffers[index % count]
}

/// A unit, what of it is this rank's, and that: parameters, first and second moments.
type Seen<'a> = (&'a Unit, Range<usize>, [Cow<'a, [f32]>; 3]);

/// A rank's parts where the host can read them.
pub struct Snapshot<'a> {
    units: Vec<Seen<'a>>,
    names: Vec<[String; 3]>,
}

impl Snapshot<'_> {
    /// Of each tensor that this rank holds something of: the parameter, by its own name,
    /// and AdamW's moments `optimizer.state.<name>.exp_avg` and `.exp_avg_sq`.
    #[must_use]
    pub fn parts(&self) -> Vec<Part<'_>> {
        let mut parts = Vec::new();
        let mut before = 0;
        for (unit, own, numbers) in &self.units {
            for (which, numbers) in numbers.iter().enumerate() {
                for Piece { index, tensor, at, range } in pieces(unit, own) {
                    let name = &self.names[before + index][which];
                    parts.push(Part { name, shape: &tensor.shape, range, data: &numbers[at] });
                }
            }
            before += unit.tensors.len();
        }
        parts
    }
}

/// What a part has of one of its unit's tensors.
struct Piece<'a> {
    /// Of the tensor within the unit.
    index: usize,
    tensor: &'a Tensor,
    /// Where in the part.
    at: Range<usize>,
    /// Which of the tensor's numbers.
    range: Range<usize>,
}

/// The pieces of a part, in their order and without gaps.
fn pieces<'a>(unit: &'a Unit, own: &Range<usize>) -> impl Iterator<Item = Piece<'a>> + use<'a> {
    let own = own.clone();
    unit.tensors.iter().enumerate().filter_map(move |(index, tensor)| {
        let whole = tensor.range();
        let (start, end) = (whole.start.max(own.start), whole.end.min(own.end));
        (start < end).then(|| Piece {
            index,
            tensor,
            at: start - own.start..end - own.start,
            range: start - whole.start..end - whole.start,
        })
    })
}

fn names(tensor: &Tensor) -> [String; 3] {
    let name = &tensor.name;
    [name.clone(), format!("optimizer.state.{name}.exp_avg"), format!("optimizer.state.{name}.exp_avg_sq")]
}

fn is_block(unit: &Unit) -> bool {
    unit.what == "block"
}

fn tag(unit: &Unit) -> Tag {
    Tag::of(unit.what, unit.index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Exchange;
    use crate::comm::local::Local;
    use crate::engine::{AdamW, Cpu};
    use crate::model::{Model, Spec, initial};

    const SEQ: usize = 8;
    const GLOBAL: usize = 5;
    const MICRO: usize = 2;

    fn spec(tied: bool) -> Spec {
        Spec::from_hf(&serde_json::json!({
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 61, "hidden_size": 20,
            "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6,
            "intermediate_size": 28, "tie_word_embeddings": tied, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        }))
        .unwrap()
    }

    fn plan(spec: &Spec, rank: u32, world: u32) -> Plan {
        let sequence = SEQ * spec.hidden;
        Plan { sequences: MICRO, sequence, rank, world, reduce: Precision::F32, overlaps: false }
    }

    fn sharded(engine: &Cpu, spec: &Spec, plan: Plan) -> Sharded<Cpu> {
        let mut sharded = Sharded::new(engine, spec.units(), plan).unwrap();
        let begun = sharded.initialise(engine, |tensor, range, numbers| {
            initial(tensor, 3, range, numbers);
            Ok::<(), EngineError>(())
        });
        begun.unwrap();
        sharded
    }

    /// Samples `from..to` of a global batch, each of its own tokens.
    fn batch(from: usize, to: usize) -> Option<Batch<Cpu>> {
        let tokens =
            |shift: usize| (from * SEQ..to * SEQ).map(|i| ((i + shift) * (i + shift) * 7 % 61) as u32).collect();
        (from < to).then(|| Batch { sequences: to - from, inputs: tokens(0), targets: tokens(1) })
    }

    /// Some steps of a global batch of 5 by ranks that have 2 at once: uneven, and with
    /// four or more ranks some have no second micro-batch or none at all. Gives the
    /// losses, the norms and rank 0's view of all parameters in the end.
    fn train<C: Collective<Cpu>>(comm: &mut C, tied: bool) -> (Vec<[f64; 2]>, Vec<f32>) {
        let (engine, spec) = (Cpu::default(), spec(tied));
        let (rank, world) = (comm.rank() as usize, comm.world_size() as usize);
        let plan = Plan { overlaps: comm.overlaps(), ..plan(&spec, rank as u32, world as u32) };
        let mut sharded = sharded(&engine, &spec, plan);
        let mut model = Model::new(&engine, &spec, MICRO, SEQ, 3).unwrap();
        let share = |rank: usize| GLOBAL * rank / world;
        let mut told = Vec::new();
        for step in 1..=4 {
            for micro in 0..GLOBAL.div_ceil(world).div_ceil(MICRO) {
                let from = (share(rank) + micro * MICRO).min(share(rank + 1));
                let batch = batch(from, (from + MICRO).min(share(rank + 1)));
                let scale = 1.0 / (GLOBAL * SEQ) as f32;
                sharded.micro_step(&engine, comm, &mut model, batch.as_ref(), scale, micro == 0).unwrap();
            }
            let loss = sharded.take_loss(&engine).unwrap();
            let mut sums = [loss / (GLOBAL * SEQ) as f64, sharded.sum_of_squares(&engine).unwrap()];
            comm.sum(Tag::of("step", step), &mut sums).unwrap();
            told.push([sums[0], sums[1].sqrt()]);
            let how = AdamW {
                lr: 1e-2,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                step: u64::from(step),
                grad_scale: (1.0 / sums[1].sqrt()).min(1.0) as f32,
            };
            sharded.update(&engine, how).unwrap();
        }
        let mut all = Vec::new();
        let shown = sharded.each_tensor(&engine, comm, |_, numbers| {
            all.extend_from_slice(numbers);
            Ok::<(), ShardError>(())
        });
        shown.unwrap();
        (told, all)
    }

    /// Says that it overlaps. What was begun is finished once, before the same memory is
    /// given again: else the numbers that it poisons would show.
    struct Beside {
        local: Local,
        begun: u64,
        ongoing: Vec<(u64, *const f32)>,
        most: usize,
    }

    impl Beside {
        fn begin(&mut self, full: &[f32]) -> Ongoing {
            self.begun += 1;
            assert!(self.ongoing.iter().all(|(_, at)| *at != full.as_ptr()), "given again before it was finished");
            self.ongoing.push((self.begun, full.as_ptr()));
            self.most = self.most.max(self.ongoing.len());
            Ongoing(self.begun)
        }
    }

    impl Exchange for Beside {
        fn rank(&self) -> u32 {
            self.local.rank()
        }

        fn world_size(&self) -> u32 {
            self.local.world_size()
        }

        fn exchange(&mut self, tag: Tag, own: &[u8]) -> std::result::Result<Vec<Vec<u8>>, CommError> {
            self.local.exchange(tag, own)
        }

        fn broadcast(&mut self, tag: Tag, root: u32, bytes: &mut Vec<u8>) -> std::result::Result<(), CommError> {
            self.local.broadcast(tag, root, bytes)
        }

        fn barrier(&mut self, tag: Tag) -> std::result::Result<(), CommError> {
            self.local.barrier(tag)
        }
    }

    impl Collective<Cpu> for Beside {
        fn overlaps(&self) -> bool {
            true
        }

        fn all_gather(&mut self, engine: &Cpu, tag: Tag, full: &mut [f32]) -> Result<Ongoing> {
            let ongoing = self.begin(full);
            let Ongoing(_) = self.local.all_gather(engine, tag, full)?;
            Ok(ongoing)
        }

        fn reduce_scatter(&mut self, engine: &Cpu, tag: Tag, full: &mut [f32]) -> Result<Ongoing> {
            let ongoing = self.begin(full);
            let Ongoing(_) = self.local.reduce_scatter(engine, tag, full)?;
            let (rank, part) = (self.rank() as usize, full.len() / self.world_size() as usize);
            for (i, part) in full.chunks_exact_mut(part).enumerate().filter(|(i, _)| *i != rank) {
                part.fill(f32::NAN + i as f32);
            }
            Ok(ongoing)
        }

        fn all_reduce(&mut self, engine: &Cpu, tag: Tag, values: &mut [f32]) -> Result<Ongoing> {
            let ongoing = self.begin(values);
            let Ongoing(_) = self.local.all_reduce(engine, tag, values)?;
            Ok(ongoing)
        }

        fn finish(&mut self, _engine: &Cpu, ongoing: Ongoing) -> Result<()> {
            let before = self.ongoing.len();
            self.ongoing.retain(|(begun, _)| *begun != ongoing.0);
            assert_eq!(self.ongoing.len() + 1, before, "{ongoing:?} was not begun, or is finished");
            Ok(())
        }
    }

    #[test]
    fn collectives_beside_the_computation_give_the_same_bits() {
        for tied in [true, false] {
            for world in [2, 3] {
                let plain = at_world(world, tied);
                std::thread::scope(|scope| {
                    let ranks = Local::group(world).into_iter().map(|local| {
                        scope.spawn(move || {
                            let mut beside = Beside { local, begun: 0, ongoing: Vec::new(), most: 0 };
                            let trained = train(&mut beside, tied);
                            assert!(beside.ongoing.is_empty() && beside.most >= 2, "{} at once", beside.most);
                            trained
                        })
                    });
                    let ranks: Vec<_> = ranks.collect();
                    assert!(ranks.into_iter().all(|rank| rank.join().unwrap() == plain), "world {world}");
                });
            }
        }
    }

    fn at_world(world: u32, tied: bool) -> (Vec<[f64; 2]>, Vec<f32>) {
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                Local::group(world).into_iter().map(|mut comm| scope.spawn(move || train(&mut comm, tied))).collect();
            let mut all: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert!(all.windows(2).all(|two| two[0] == two[1]), "ranks see different numbers");
            all.remove(0)
        })
    }

    #[test]
    fn any_number_of_ranks_computes_the_same_steps() {
        for tied in [true, false] {
            let (alone, parameters) = at_world(1, tied);
            assert!(alone[3][0] < alone[0][0] - 0.1, "the loss does not fall: {alone:?}");
            for world in [2, 3, 4, 7] {
                let (together, others) = at_world(world, tied);
                for (one, other) in alone.iter().flatten().zip(together.iter().flatten()) {
                    assert!((one - other).abs() <= 1e-5 * one.abs(), "world {world}: {alone:?} and {together:?}");
                }
                let most = parameters.iter().zip(&others).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
                assert!(parameters.len() == others.len() && most < 1e-3, "world {world}: parameters differ by {most}");
            }
        }
    }

    /// The parts of all ranks are every tensor once, without padding, also where ranks
    /// have nothing of a unit.
    #[test]
    fn parts_cover_each_tensor_once_and_go_back_bit_by_bit() {
        let engine = Cpu::default();
        for world in [1, 2, 3, 50] {
            let spec = spec(false);
            let mut found = std::collections::BTreeMap::<String, Vec<Range<usize>>>::new();
            for rank in 0..world {
                let mut kept = sharded(&engine, &spec, plan(&spec, rank, world));
                let snapshot = kept.snapshot(&engine).unwrap();
                let copies: Vec<(String, Vec<f32>)> = snapshot
                    .parts()
                    .iter()
                    .map(|part| {
                        assert_eq!(part.data.len(), part.range.len());
                        found.entry(part.name.to_string()).or_default().push(part.range.clone());
                        // Moments are zero; other values show where they go.
                        let value = |i: usize| part.data[i] + (part.range.start + i) as f32 + part.name.len() as f32;
                        (part.name.to_string(), (0..part.data.len()).map(value).collect())
                    })
                    .collect();
                drop(snapshot);
                kept.load(&engine, |parts| {
                    assert_eq!(parts.len(), copies.len());
                    for (part, (name, data)) in parts.iter_mut().zip(&copies) {
                        assert_eq!(part.name, name);
                        part.data.copy_from_slice(data);
                    }
                    Ok::<(), EngineError>(())
                })
                .unwrap();
                let again = kept.snapshot(&engine).unwrap();
                assert!(again.parts().iter().zip(&copies).all(|(part, (_, data))| part.data == data.as_slice()));
            }
            let tensors: Vec<Tensor> = spec.units().into_iter().flat_map(|unit| unit.tensors).collect();
            assert_eq!(found.len(), 3 * tensors.len());
            for tensor in &tensors {
                for name in names(tensor) {
                    let mut at = 0;
                    for range in &found[&name] {
                        assert_eq!(range.start, at, "{name}");
                        at = range.end;
                    }
                    assert_eq!(at, tensor.len(), "{name}");
                }
            }
        }
    }
}
