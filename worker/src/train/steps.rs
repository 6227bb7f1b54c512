//! From the first rank that is there to the exported model.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::metrics::{self, Reporter, Stragglers, Times, Window};
use super::places::{Place, sharing};
use super::{TrainError, export, learning_rate, output, restarts, signals};
use crate::checkpoint::{
    CheckpointError, Checkpoints, Chosen, Dtype, Export, Exporter, Import, PartMut, Schedule, TrainState, What, agree,
    why,
};
use crate::comm::{Collective, Tag};
use crate::config::{Config, ExportDtype, changed};
use crate::data::{Batches, Beside, Dataset, Order};
use crate::engine::{AdamW, Engine};
use crate::model::{Model, Spec, initial};
use crate::shard::{Batch, Plan, ShardError, Sharded};

type Result<T> = std::result::Result<T, TrainError>;

/// After so many steps in a row whose loss or norm is not finite the training ends.
const SKIPS_IN_A_ROW: u64 = 5;

/// What a training is given.
#[derive(Debug, Clone)]
pub struct Job<'a> {
    /// What was asked for.
    pub config: &'a Config,
    /// This rank's host, for errors.
    pub host: &'a str,
    /// PALINGENESIS_LAUNCH_ID.
    pub launch: Option<&'a str>,
    /// When this process began.
    pub started: Instant,
}

/// How a training ended that nothing went wrong with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All steps are done.
    Done,
    /// A signal came; the state after this step is kept, unless there was no time.
    Interrupted {
        /// Steps done.
        step: u64,
        /// The step of the checkpoint from which the next start goes on.
        kept: u64,
    },
}

/// Trains: all ranks call it together.
///
/// # Errors
/// See [`TrainError`]. What other ranks cannot know by themselves must be told them.
pub fn run<E: Engine, C: Collective<E>>(engine: &E, comm: &mut C, job: &Job<'_>) -> Result<End> {
    let mut training = Training::begin(engine, comm, job)?;
    let end = training.steps()?;
    if end == End::Done {
        training.finish()?;
    }
    Ok(end)
}

struct Training<'a, E: Engine, C: Collective<E>> {
    engine: &'a E,
    comm: &'a mut C,
    job: &'a Job<'a>,
    config: &'a Config,
    spec: Spec,
    /// For config.json, see [`export::special_tokens`].
    special: Map<String, Value>,
    identity: Value,
    dataset: Dataset,
    /// Of this rank's part of the shards.
    data_check: Beside,
    batches: Batches,
    sharded: Sharded<E>,
    model: Model<E>,
    checkpoints: Checkpoints,
    state: TrainState,
    /// Rank 0's.
    reporter: Option<Reporter>,
    stragglers: Stragglers,
    /// Of this window.
    times: Times,
    /// The step of the newest checkpoint.
    kept: u64,
    /// How long the slowest save of this start took, seconds; before it has made one, the last
    /// one of the start before.
    save_time: f64,
    /// Whether it has made one.
    saved: bool,
    skipped_in_a_row: u64,
}

/// What one step came to.
struct Outcome {
    loss: f64,
    lr: f64,
    norm: f64,
    signalled: bool,
}

impl<'a, E: Engine, C: Collective<E>> Training<'a, E, C> {
    fn rank(&self) -> usize {
        self.comm.rank() as usize
    }

    fn world(&self) -> usize {
        self.comm.world_size() as usize
    }

    /// Steps up to the last, or to a signal.
    fn steps(&mut self) -> Result<End> {
        let train = &self.config.train;
        let (mut since, mut before) = (Instant::now(), self.state.step);
        let first = self.state.step + 1;
        signals::arm(true);
        while self.state.step < train.steps {
            let outcome = self.step()?;
            let step = self.state.step;
            if step == first {
                let first_step_s = self.job.started.elapsed().as_secs_f64();
                self.event("first_step", json!({ "step": step, "seconds_since_start": first_step_s }));
            }
            if step.is_multiple_of(train.log_every.max(1)) || step == train.steps || step == first {
                self.window(&outcome, since.elapsed(), step - before)?;
                (since, before) = (Instant::now(), step);
            } else if let Some(reporter) = &self.reporter {
                reporter.step(step);
            }
            if outcome.signalled {
                return self.interrupted();
            }
            let every = self.config.checkpoint.every;
            if (every > 0 && step.is_multiple_of(every)) || step == train.steps {
                let saving = Instant::now();
                self.save()?;
                since += saving.elapsed();
            }
        }
        Ok(End::Done)
    }

    /// One optimizer step.
    fn step(&mut self) -> Result<Outcome> {
        let (config, rank, world) = (&self.config.train, self.rank(), self.world());
        self.data_check.is_over(Duration::ZERO)?;
        let begun = Instant::now();
        // Gradients are those of the mean over all tokens of the global batch.
        let tokens = config.global_batch_size as u64 * config.seq_len as u64;
        let scale = 1.0 / tokens as f32;
        for micro_step in 0..self.batches.micro_steps(world) {
            let reading = Instant::now();
            let samples = self.batches.micro(self.state.step, micro_step, rank, world);
            let batch = self.batch(&samples)?;
            self.times.data += reading.elapsed().as_secs_f64();
            self.times.sequences += samples.len() as f64;
            let first = micro_step == 0;
            self.sharded.micro_step(self.engine, self.comm, &mut self.model, batch.as_ref(), scale, first)?;
        }

        let mut sums = [
            self.sharded.take_loss(self.engine)? / tokens as f64,
            self.sharded.sum_of_squares(self.engine)?,
            f64::from(u8::from(signals::asked().is_some())),
        ];
        let waiting = Instant::now();
        self.comm.sum(Tag::of("step", self.state.step as u32), &mut sums)?;
        let waited = waiting.elapsed() + self.sharded.take_waited();
        let [loss, squares, signalled] = sums;

        let (norm, lr) = (squares.sqrt(), learning_rate(config, self.state.step + 1));
        if !loss.is_finite() || !norm.is_finite() {
            self.skip(loss, norm)?;
        } else {
            self.skipped_in_a_row = 0;
            // As torch.nn.utils.clip_grad_norm_ has it.
            let clip = config.grad_clip;
            let grad_scale = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
            self.sharded.update(
                self.engine,
                AdamW {
                    lr,
                    beta1: config.beta1,
                    beta2: config.beta2,
                    eps: config.eps,
                    weight_decay: config.weight_decay,
                    step: self.state.step + 1 - self.state.skipped,
                    grad_scale: grad_scale as f32,
                },
            )?;
        }
        self.state.step += 1;
        self.state.samples += config.global_batch_size as u64;
        self.state.tokens += tokens;
        let busy = begun.elapsed().saturating_sub(waited).as_secs_f64();
        self.times.wait += waited.as_secs_f64();
        self.times.compute += busy;
        Ok(Outcome { loss, lr, norm, signalled: signalled > 0.0 })
    }

    /// Counts a step that must change nothing.
    fn skip(&mut self, loss: f64, norm: f64) -> Result<()> {
        let step = self.state.step + 1;
        self.state.skipped += 1;
        self.skipped_in_a_row += 1;
        let what = format!("step {step}: loss {loss}, gradient norm {norm}: not finite");
        self.event("skipped", json!({ "step": step, "loss": loss.to_string(), "grad_norm": norm.to_string() }));
        if self.skipped_in_a_row >= SKIPS_IN_A_ROW {
            let cure = "lower train.lr, set train.grad_clip, or look at the data";
            return Err(TrainError::Diverged(format!("{what}, {SKIPS_IN_A_ROW} times in a row; {cure}")));
        }
        self.say(&format!("warning: {what}, so it changes nothing"));
        Ok(())
    }

    /// The tokens of some samples; none without samples.
    fn batch(&self, samples: &[u64]) -> Result<Option<Batch<E>>> {
        if samples.is_empty() {
            return Ok(None);
        }
        let (sequences, length) = (samples.len(), self.config.train.seq_len);
        let (mut inputs, mut targets) = (vec![0; sequences * length], vec![0; sequences * length]);
        let rows = inputs.chunks_exact_mut(length).zip(targets.chunks_exact_mut(length));
        for (sample, (inputs, targets)) in samples.iter().zip(rows) {
            self.dataset.sample(*sample, inputs, targets)?;
        }
        let (inputs, targets) = (self.engine.tokens(&inputs)?, self.engine.tokens(&targets)?);
        Ok(Some(Batch { sequences, inputs, targets }))
    }

    /// Tells what the last steps were like.
    fn window(&mut self, outcome: &Outcome, took: Duration, steps: u64) -> Result<()> {
        self.times.compute -= self.times.data;
        self.times.memory = metrics::peak_memory();
        self.times.device_memory = self.engine.memory_in_use().unwrap_or(0) as f64;
        let own = std::mem::take(&mut self.times).to_bytes();
        let all = self.comm.exchange(Tag::of("times", self.state.step as u32), &own)?;
        let times: Vec<Times> = all.iter().map(|bytes| Times::from_bytes(bytes)).collect();
        // All ranks see the same times and so agree; a slow one tells its own host.
        for (rank, score) in self.stragglers.window(&times) {
            if rank == self.rank() {
                let speed = format!("{:.0} % of the fastest rank's speed", score * 100.0);
                let host = self.job.host;
                palingenesis::system::output::to_stderr(&format!(
                    "palingenesis-worker: warning: rank {rank} on {host} keeps the others waiting: it computes at {speed}\n"
                ));
            }
            self.event("straggler", json!({ "rank": rank, "score": score, "step": self.state.step }));
        }
        if let Some(reporter) = &mut self.reporter {
            let train = &self.config.train;
            reporter.window(&Window {
                step: self.state.step,
                loss: outcome.loss,
                lr: outcome.lr,
                grad_norm: outcome.norm,
                tokens: train.global_batch_size as u64 * train.seq_len as u64,
                tokens_seen: self.state.tokens,
                steps,
                took,
                skipped: self.state.skipped,
                times: &times,
            });
        }
        Ok(())
    }

    fn event(&mut self, event: &str, more: Value) {
        if let Some(reporter) = &mut self.reporter {
            reporter.event(event, more);
        }
    }

    /// Rank 0 says it for all.
    fn say(&self, text: &str) {
        if let Some(reporter) = &self.reporter {
            reporter.say(text);
        }
    }

    /// Everything up to the first step.
    fn begin(engine: &'a E, comm: &'a mut C, job: &'a Job<'a>) -> Result<Training<'a, E, C>> {
        let config = job.config;
        let train = &config.train;
        let (rank, world) = (comm.rank(), comm.world_size());
        let (spec, described) = spec(config)?;
        let dataset = dataset(config, &spec)?;
        let mut data_check = dataset.check(rank as usize, world as usize).beside()?;
        if !data_check.is_over(AT_FIRST)? && rank == 0 {
            let gigabytes = dataset.bytes() as f64 / 1e9;
            tell(&format!(
                "the data's checksums are compared beside the training, {gigabytes:.1} GB by all ranks together"
            ));
        }
        let special = export::special_tokens(config, &described, dataset.eos());
        let identity = config.identity(&spec.to_hf(), &dataset.fingerprint());
        same_on_all(comm, job, &identity)?;
        output::usable(comm, &train.output_dir)?;
        let order = Order::new(train.seed, dataset.samples(train.seq_len), config.data.shuffle);
        let batches = Batches::new(order, train.global_batch_size, train.micro_batch_size);
        // No rank has more at once than its share of a step.
        let sequences = train.micro_batch_size.min(train.global_batch_size.div_ceil(world as usize));

        let mut checkpoints = Checkpoints::new(&train.output_dir, job.launch, job.host, PATIENCE);
        let wait = Duration::from_secs(config.checkpoint.grace);
        checkpoints.claim(comm, wait, &tell)?;
        let mut notice = |text: &str| tell(text);
        let choice = match checkpoints.choose(comm, &train.resume_from, &mut notice) {
            // Who is started again reads all of them again: not for ever.
            Err(error @ CheckpointError::Damaged(_)) => {
                count_start(comm, job, 0).map_err(|end| match end {
                    TrainError::NoProgress(text) => TrainError::NoProgress(format!("{text}; this time: {error}")),
                    other => other,
                })?;
                return Err(error.into());
            }
            choice => choice?,
        };
        if rank == 0 {
            choice.skipped.iter().for_each(|skipped| tell(&format!("warning: not resumed from {skipped}")));
            checkpoints.tidy(choice.chosen.as_ref()).iter().for_each(|note| tell(&format!("warning: {note}")));
        }
        let mut state = TrainState { seed: train.seed, ..TrainState::default() };
        if let Some(chosen) = &choice.chosen {
            state = resumed(config, &identity, chosen, rank == 0)?;
        }
        state.schedule =
            Schedule { steps: train.steps, warmup_steps: train.warmup_steps, lr: train.lr, min_lr: train.min_lr };
        // One whose steps are all done, too: what it cannot export it would try for ever.
        let save_time = count_start(comm, job, state.step)?;

        let plan = Plan {
            sequences,
            sequence: train.seq_len * spec.hidden,
            rank,
            world,
            reduce: train.reduce_dtype,
            overlaps: comm.overlaps(),
        };
        let mut sharded = Sharded::new(engine, spec.units(), plan)?;
        let chunk = if train.loss_chunk == 0 { engine.loss_chunk() } else { train.loss_chunk };
        let model = Model::new(engine, &spec, sequences, train.seq_len, chunk)?;
        match (&choice.chosen, &config.model.path) {
            (Some(chosen), _) => sharded.load(engine, |parts| {
                checkpoints.load(comm, chosen, parts)?;
                Ok::<(), TrainError>(())
            })?,
            (None, Some(path)) if !config.model.random_init => {
                let import = Import::open(path)?;
                import.check(&names_and_shapes(&sharded), spec.tied)?;
                sharded.initialise(engine, |tensor, range, data| {
                    import.read(&mut PartMut { name: &tensor.name, shape: &tensor.shape, range, data })?;
                    Ok::<(), TrainError>(())
                })?;
            }
            _ => sharded.initialise(engine, |tensor, range, numbers| {
                initial(tensor, train.seed, range, numbers);
                Ok::<(), TrainError>(())
            })?,
        }

        let stragglers = Stragglers::without(who_shares(comm, job)?);
        let mut reporter = None;
        if rank == 0 {
            let opened = Reporter::open(&train.output_dir, train.steps, state.step);
            reporter = Some(opened.map_err(|error| {
                let (host, place) = (job.host, train.output_dir.join(metrics::FILE));
                TrainError::Storage(format!("rank 0 on {host} could not write {}: {}", place.display(), why(&error)))
            })?);
        }
        let mut training = Training {
            kept: if choice.chosen.is_some() { state.step } else { 0 },
            engine,
            comm,
            job,
            config,
            spec,
            special,
            identity,
            dataset,
            data_check,
            batches,
            sharded,
            model,
            checkpoints,
            state,
            reporter,
            stragglers,
            times: Times::default(),
            save_time,
            saved: false,
            skipped_in_a_row: 0,
        };
        training.tell_start(choice.chosen.as_ref().map(|chosen| chosen.name.as_str()));
        Ok(training)
    }

    fn tell_start(&mut self, from: Option<&str>) {
        let (parameters, world, step) = (self.sharded.parameters(), self.world(), self.state.step);
        let from = from.map_or_else(|| "from the beginning".into(), |name| format!("from {name}"));
        self.say(&format!(
            "{parameters} parameters over {world} {}, {} of {} steps to go, {from}",
            if world == 1 { "rank" } else { "ranks" },
            self.config.train.steps.saturating_sub(step),
            self.config.train.steps,
        ));
        if let Some(warning) = self.engine.warning(self.spec.head_dim) {
            self.say(&format!("warning: {warning}"));
        }
        let ready = self.job.started.elapsed().as_secs_f64();
        self.event(
            "start",
            json!({
                "step": step, "world_size": world, "parameters": parameters, "restarts": self.state.restarts,
                "launch": self.job.launch, "seconds_since_start": ready,
            }),
        );
    }

    /// Writes a checkpoint and removes those that are no longer kept.
    fn save(&mut self) -> Result<()> {
        let step = self.state.step;
        let snapshot = self.sharded.snapshot(self.engine)?;
        let what = What { state: &self.state, config: &self.identity, parts: &snapshot.parts() };
        let saved = self.checkpoints.save(self.comm, what)?;
        drop(snapshot);
        self.kept = step;
        let before = if self.saved { self.save_time } else { 0.0 };
        self.save_time = before.max(saved.took.as_secs_f64());
        self.saved = true;
        if self.rank() == 0 {
            restarts::remember_save(&self.config.train.output_dir, saved.took);
        }
        let purged = self.checkpoints.purge(self.comm, self.config.checkpoint.keep, &mut |text| tell(text))?;
        let seconds = saved.took.as_secs_f64();
        self.event("checkpoint", json!({ "step": step, "bytes": saved.bytes, "seconds": seconds }));
        self.say(&format!("step-{step} is kept: {:.1} MB in {seconds:.2} s", saved.bytes as f64 / 1e6));
        purged.notes.iter().for_each(|note| self.say(&format!("warning: {note}")));
        Ok(())
    }

    /// The model for others, unit by unit.
    fn export(&mut self) -> Result<()> {
        let rank = self.rank();
        let tensors = names_and_shapes(&self.sharded);
        let copy = export::companions(self.config, self.dataset.tokenizer_files());
        let config = export::config_json(self.spec.to_hf(), &self.special);
        let dtype = match self.config.checkpoint.export_dtype {
            ExportDtype::F32 => Dtype::F32,
            ExportDtype::Bf16 => Dtype::Bf16,
        };
        let export = Export { tensors: &tensors, dtype, config: &config, copy: &copy };
        // The others give rank 0 all units, whatever becomes of them there.
        let mut exporter = (rank == 0).then(|| self.checkpoints.export(&export));
        self.sharded.each_tensor(self.engine, self.comm, |tensor, numbers| {
            if let Some(Ok(to)) = &mut exporter
                && let Err(error) = to.tensor(&tensor.name, numbers)
            {
                exporter = Some(Err(error));
            }
            Ok::<(), ShardError>(())
        })?;
        // What was gathered last is only known to be right when all ranks have spoken after it.
        self.comm.barrier(Tag::of("export", 1))?;
        let own = exporter.map(|exporter| exporter.and_then(Exporter::finish));
        let exported = agree(self.comm, Tag::of("export", 0), own)?;
        let place = exported.directory.display();
        self.say(&format!("the model is in {place}: {:.1} MB", exported.bytes as f64 / 1e6));
        if let Some(aside) = &exported.aside {
            self.say(&format!("warning: what was in {place} is in {} now", aside.display()));
        }
        Ok(())
    }

    /// A signal came to some rank: a checkpoint, if there is time for one.
    fn interrupted(&mut self) -> Result<End> {
        let step = self.state.step;
        let own = [signals::asked().map_or(0.0, |since| since.as_secs_f64()), self.save_time];
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.comm.exchange(Tag::of("signal", step as u32), &own)?;
        let most = |at: usize| {
            let each =
                all.iter().filter_map(|bytes| bytes.get(at * 8..at * 8 + 8)?.try_into().ok().map(f64::from_le_bytes));
            each.fold(0.0, f64::max)
        };
        let (since, save) = (most(0), most(1));
        let grace = self.config.checkpoint.grace as f64;
        if self.kept != step && since + save <= grace {
            self.save()?;
        } else if self.kept != step {
            self.say(&format!(
                "warning: signal {since:.1} s ago: a checkpoint takes {save:.1} s, more than checkpoint.grace = {grace} leaves: \
                 none is written"
            ));
        }
        self.event("interrupted", json!({ "step": step, "kept": self.kept }));
        if let Some(reporter) = &self.reporter {
            reporter.end();
        }
        self.say(&format!("ended by a signal after step {step}; the next start goes on from step {}", self.kept));
        Ok(End::Interrupted { step, kept: self.kept })
    }

    /// The state is kept, all else can be done again: the model for others, and the end.
    fn finish(&mut self) -> Result<()> {
        signals::arm(false);
        if self.config.checkpoint.export {
            self.export()?;
        }
        if self.rank() == 0 {
            restarts::forget(&self.config.train.output_dir);
        }
        let step = self.state.step;
        self.event("end", json!({ "step": step, "seconds_since_start": self.job.started.elapsed().as_secs_f64() }));
        if let Some(reporter) = &self.reporter {
            reporter.end();
        }
        self.say(&format!("done: {step} steps, {} tokens", self.state.tokens));
        Ok(())
    }
}

/// What is checked within this time is known to be right before the first step.
const AT_FIRST: Duration = Duration::from_millis(200);

/// A file that another node has just made may take so long to be seen (NFS).
const PATIENCE: Duration = Duration::from_secs(60);

fn names_and_shapes<E: Engine>(sharded: &Sharded<E>) -> Vec<(String, Vec<usize>)> {
    let tensors = sharded.units().flat_map(|unit| &unit.tensors);
    tensors.map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect()
}

fn tell(text: &str) {
    palingenesis::system::output::to_stderr(&format!("palingenesis-worker: {text}\n"));
}

/// By rank, whether it shares CPUs with others by how they were placed, which rank 0 tells.
fn who_shares<E: Engine, C: Collective<E>>(comm: &mut C, job: &Job<'_>) -> Result<Vec<bool>> {
    let own = serde_json::to_vec(&Place::own(job.host, job.config.train.threads)).unwrap_or_default();
    let all = comm.exchange(Tag::of("places", 0), &own)?;
    let places: Vec<Place> = all.iter().map(|bytes| serde_json::from_slice(bytes).unwrap_or_default()).collect();
    let sharing = sharing(&places);
    let many = sharing.iter().filter(|shares| **shares).count();
    if comm.rank() == 0 && many > 0 {
        tell(&format!(
            "{many} of {} ranks compute with more threads than they have CPUs: bind each to its own (srun --cpu-bind=cores) \
             or lower train.threads, if that was not meant; none of them is told to be slow",
            sharing.len()
        ));
    }
    Ok(sharing)
}

/// Ranks that were given different things would compute nonsense, or wait for each other.
fn same_on_all<E: Engine, C: Collective<E>>(comm: &mut C, job: &Job<'_>, identity: &Value) -> Result<()> {
    let Config { model, train, checkpoint, .. } = job.config;
    let mut own = identity.clone();
    if let (Value::Object(own), Value::Object(more)) = (
        &mut own,
        json!({
            "model.random_init": model.random_init, "train.output_dir": train.output_dir,
            "train.resume_from": format!("{:?}", train.resume_from), "train.micro_batch_size": train.micro_batch_size,
            "train.log_every": train.log_every, "train.param_dtype": format!("{:?}", train.param_dtype),
            "train.reduce_dtype": format!("{:?}", train.reduce_dtype), "checkpoint.every": checkpoint.every, "checkpoint.keep": checkpoint.keep,
            "checkpoint.export": checkpoint.export, "checkpoint.grace": checkpoint.grace,
        }),
    ) {
        own.extend(more);
    }
    let told = serde_json::to_vec(&(job.host, &own)).unwrap_or_default();
    let all = comm.exchange(Tag::of("configuration", 0), &told)?;
    let all: Vec<(String, Value)> = all.iter().map(|bytes| serde_json::from_slice(bytes).unwrap_or_default()).collect();
    let Some((first_host, first)) = all.first() else { return Ok(()) };
    for (rank, (host, own)) in all.iter().enumerate() {
        if let Some(change) = changed(first, own).first() {
            // All have compared before the first one ends: none is to take that for the
            // reason. Whoever misses this has compared, too.
            let _ = comm.barrier(Tag::of("configuration", 1));
            return Err(TrainError::Config(format!(
                "rank {rank} on {host} has another configuration than rank 0 on {first_host}: {} is {} there and {} here; \
                 give all ranks the same file and the same overrides",
                change.key, change.new, change.old
            )));
        }
    }
    Ok(())
}

/// The model's shape, and the config.json from which it follows.
fn spec(config: &Config) -> Result<(Spec, Value)> {
    let value = match (&config.model.path, &config.model.shape) {
        (Some(path), _) => {
            let file = path.join("config.json");
            let wrong = |why: String| TrainError::Config(format!("model.path: {}: {why}", file.display()));
            let text = std::fs::read(&file).map_err(|error| wrong(error.to_string()))?;
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?
        }
        (None, Some(shape)) => shape.clone(),
        (None, None) => {
            return Err(TrainError::Config("[model] names neither path nor shape; give one of them".into()));
        }
    };
    let spec = Spec::from_hf(&value)?;
    let seq_len = config.train.seq_len;
    if seq_len > spec.max_positions {
        let most = spec.max_positions;
        let cure = "lower train.seq_len, or raise max_position_embeddings if the model is new";
        return Err(TrainError::Config(format!(
            "train.seq_len = {seq_len} is more than the model's max_position_embeddings = {most}; {cure}"
        )));
    }
    Ok((spec, value))
}

fn dataset(config: &Config, spec: &Spec) -> Result<Dataset> {
    let dataset = Dataset::open(&config.data.path)?;
    if dataset.vocab() > spec.vocab {
        return Err(TrainError::Config(format!(
            "data.path = {} has token ids up to {}, the model's vocab_size is {}; prepare the data with the model's \
             tokenizer, or give the model a larger vocab_size",
            config.data.path.display(),
            dataset.vocab() - 1,
            spec.vocab
        )));
    }
    dataset.enough(config.train.seq_len)?;
    Ok(dataset)
}

/// Where the training stood, if it is the same training.
fn resumed(config: &Config, identity: &Value, chosen: &Chosen, tells: bool) -> Result<TrainState> {
    let train = &config.train;
    let Some(manifest) = &chosen.manifest else {
        // Another program's: its directory's name is all that is known.
        let samples = chosen.step.saturating_mul(train.global_batch_size as u64);
        let tokens = samples.saturating_mul(train.seq_len as u64);
        return Ok(TrainState { step: chosen.step, samples, tokens, seed: train.seed, ..TrainState::default() });
    };
    let changes = changed(&manifest.config, identity);
    let fixed: Vec<String> = changes.iter().filter(|change| change.fixed).map(ToString::to_string).collect();
    if !fixed.is_empty() {
        return Err(TrainError::Config(format!(
            "{} cannot be gone on from: {}; set it back, or begin anew with another train.output_dir",
            chosen.name,
            fixed.join(", ")
        )));
    }
    for change in changes.iter().filter(|_| tells) {
        tell(&format!("warning: since {}: {change}", chosen.name));
    }
    let mut state = manifest.state.clone();
    state.restarts = state.restarts.saturating_add(1);
    Ok(state)
}

/// Rank 0 counts this start; too many without progress end here. Gives how long the last save
/// took, seconds.
fn count_start<E: Engine, C: Collective<E>>(comm: &mut C, job: &Job<'_>, step: u64) -> Result<f64> {
    let (config, host) = (job.config, job.host);
    let output = &config.train.output_dir;
    let failed = |verb: &str, path: &Path, error: &io::Error| {
        CheckpointError::Storage(format!("rank 0 on {host} could not {verb} {}: {}", path.display(), why(error)))
    };
    let count = || {
        std::fs::create_dir_all(output).map_err(|error| failed("make", output, &error))?;
        restarts::count(output, step).map_err(|error| failed("write", &output.join(restarts::FILE), &error))
    };
    let own = (comm.rank() == 0).then(count);
    let counted = agree(comm, Tag::of("restarts", 0), own)?;
    let most = config.checkpoint.max_restarts_without_progress;
    if counted.fruitless > most {
        // All know it before the first one ends: none is to take that for the reason.
        let _ = comm.barrier(Tag::of("restarts", 1));
        let starts = counted.fruitless;
        let what = match step < config.train.steps {
            true => format!("{starts} starts in a row went on from step {step} and kept no later one"),
            false => format!("{starts} starts in a row found all {step} steps done and did not export the model"),
        };
        return Err(TrainError::NoProgress(format!(
            "{what} (checkpoint.max_restarts_without_progress = {most}); find out why with the earlier logs, then remove {}",
            output.join(restarts::FILE).display()
        )));
    }
    Ok(counted.save_ms as f64 / 1000.0)
}
