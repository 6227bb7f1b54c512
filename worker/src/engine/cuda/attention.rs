//! Which kernels compute attention, and how they are launched: on tensor cores where the
//! heads and the precision allow it, without them else. What is computed is in
//! `kernels/attention_*.cu`; the tiles' sizes here are those of there.

use super::device::{Arguments, Device};
use crate::engine::{Attention, EngineError, Precision, Result};

/// The kernels' text, in the order in which it is compiled.
pub(super) const SOURCES: &[(&str, &str)] = &[
    ("attention_common.cu", include_str!("kernels/attention_common.cu")),
    ("attention_any.cu", include_str!("kernels/attention_any.cu")),
    ("attention_tensor.cu", include_str!("kernels/attention_tensor.cu")),
];

/// The kernels.
pub(super) const NAMES: &[&str] = &[
    "attention_delta_f32",
    "attention_delta_bf16",
    "attention_any_forward_f32_64",
    "attention_any_forward_f32_128",
    "attention_any_forward_f32_256",
    "attention_any_forward_bf16_64",
    "attention_any_forward_bf16_128",
    "attention_any_forward_bf16_256",
    "attention_any_backward_keys_f32_64",
    "attention_any_backward_keys_f32_128",
    "attention_any_backward_keys_f32_256",
    "attention_any_backward_keys_bf16_64",
    "attention_any_backward_keys_bf16_128",
    "attention_any_backward_keys_bf16_256",
    "attention_any_backward_queries_f32_64",
    "attention_any_backward_queries_f32_128",
    "attention_any_backward_queries_f32_256",
    "attention_any_backward_queries_bf16_64",
    "attention_any_backward_queries_bf16_128",
    "attention_any_backward_queries_bf16_256",
    "attention_tensor_forward_64",
    "attention_tensor_forward_128",
    "attention_tensor_backward_keys_64",
    "attention_tensor_backward_keys_128",
    "attention_tensor_backward_queries_64",
    "attention_tensor_backward_queries_128",
];

/// The widest head that any kernel has registers for.
pub const MOST_HEAD_DIM: usize = 256;

/// Threads of every block.
const THREADS: u32 = 128;

/// What a grid's second dimension can count.
const MOST_TILES: usize = 65_535;

/// Whether tensor cores compute it: without them it is much slower.
#[must_use]
pub fn is_tensor(head_dim: usize, precision: Precision) -> bool {
    precision == Precision::Bf16 && matches!(head_dim, 64 | 128)
}

/// Of the memory that [`backward`] needs beside its operands: an f32 for each row of each head.
pub(super) fn scratch_bytes(shape: Attention, _precision: Precision) -> usize {
    shape.batch * shape.heads * shape.seq * size_of::<f32>()
}

/// Addresses of the operands of [`forward`], as [`crate::engine::Engine::attention`] has them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forward {
    pub(super) out: u64,
    pub(super) log_sums: u64,
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
}

/// Addresses of the operands of [`backward`], as [`crate::engine::Engine::attention_backward`]
/// has them, and of [`scratch_bytes`] of memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backward {
    pub(super) dq: u64,
    pub(super) dk: u64,
    pub(super) dv: u64,
    pub(super) dout: u64,
    pub(super) out: u64,
    pub(super) log_sums: u64,
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) scratch: u64,
}

/// A kernel of one of the passes, and what its launch depends on.
struct Kernel {
    name: &'static str,
    /// Rows of a block's tile: the grid has one block for each.
    rows: usize,
    /// Bytes of shared memory.
    shared: usize,
}

/// The kernels of one precision and width of a head.
struct Kernels {
    forward: Kernel,
    keys: Kernel,
    queries: Kernel,
    /// That of the kernels without tensor cores is an argument.
    head_dim: Option<i32>,
}

/// Keys of a tile on tensor cores.
const TILE: usize = 64;

fn tensor(head_dim: usize) -> Kernels {
    let [forward, keys, queries] = match head_dim {
        64 => {
            ["attention_tensor_forward_64", "attention_tensor_backward_keys_64", "attention_tensor_backward_queries_64"]
        }
        _ => [
            "attention_tensor_forward_128",
            "attention_tensor_backward_keys_128",
            "attention_tensor_backward_queries_128",
        ],
    };
    // Two tiles that are kept, and of two others the one in use and the next. Where queries are
    // kept they are twice as many: of the forward pass in one tile instead of two, in the
    // backward pass with half as many keys.
    let tiles = 6 * TILE * head_dim * Precision::Bf16.bytes();
    Kernels {
        forward: Kernel { name: forward, rows: 2 * TILE, shared: tiles },
        // With each query's log-sum and delta, also of the tile in use and of the next.
        keys: Kernel { name: keys, rows: TILE, shared: tiles + 4 * TILE * size_of::<f32>() },
        queries: Kernel { name: queries, rows: 2 * TILE, shared: tiles },
        head_dim: None,
    }
}

macro_rules! any_names {
    ($of:literal) => {
        [
            concat!("attention_any_forward_", $of),
            concat!("attention_any_backward_keys_", $of),
            concat!("attention_any_backward_queries_", $of),
        ]
    };
}

fn any(head_dim: usize, precision: Precision) -> Kernels {
    let ([forward, keys, queries], width) = match (precision, head_dim) {
        (Precision::F32, ..=64) => (any_names!("f32_64"), 64),
        (Precision::F32, ..=128) => (any_names!("f32_128"), 128),
        (Precision::F32, _) => (any_names!("f32_256"), 256),
        (Precision::Bf16, ..=64) => (any_names!("bf16_64"), 64),
        (Precision::Bf16, ..=128) => (any_names!("bf16_128"), 128),
        (Precision::Bf16, _) => (any_names!("bf16_256"), 256),
    };
    // A thread's rows in the forward and in the backward pass, and its columns in the latter, as
    // attention_any.cu has them. A tile has 16 times the rows and 8 times the columns.
    let (forward_rows, rows, columns) = match width {
        64 => (4, 4, 4),
        128 => (4, 2, 4),
        _ => (2, 1, 2),
    };
    // An odd number of floats from row to row: threads that read the same column of different
    // rows meet different banks.
    let (stride, forward_rows, rows, columns) = (head_dim | 1, 16 * forward_rows, 16 * rows, 8 * columns);
    let forward_columns = 32;
    let shared = (forward_rows + forward_columns) * stride + forward_rows * (forward_columns + 1);
    let backward = 2 * (rows + columns) * stride + rows * (columns + 1);
    Kernels {
        forward: Kernel { name: forward, rows: forward_rows, shared: shared * size_of::<f32>() },
        keys: Kernel { name: keys, rows, shared: backward * size_of::<f32>() },
        queries: Kernel { name: queries, rows, shared: backward * size_of::<f32>() },
        head_dim: i32::try_from(head_dim).ok(),
    }
}

/// The kernels for these operands. Those on tensor cores read and write 16 bytes at a time.
fn kernels(shape: Attention, precision: Precision, addresses: &[u64]) -> Result<Kernels> {
    let Attention { seq, head_dim, .. } = shape;
    if head_dim > MOST_HEAD_DIM {
        return Err(EngineError::Wrong(format!(
            "heads of {head_dim} numbers are too wide for attention on a GPU, which has at most {MOST_HEAD_DIM}; train on the CPU (train.device=cpu)"
        )));
    }
    let aligned = addresses.iter().all(|address| address.is_multiple_of(16));
    let kernels = if is_tensor(head_dim, precision) && aligned { tensor(head_dim) } else { any(head_dim, precision) };
    let smallest = kernels.forward.rows.min(kernels.keys.rows).min(kernels.queries.rows);
    if seq.div_ceil(smallest) > MOST_TILES {
        return Err(EngineError::Wrong(format!(
            "sequences of {seq} tokens are too long for attention on a GPU with heads of {head_dim}: at most {}; set train.seq_len lower",
            smallest * MOST_TILES
        )));
    }
    Ok(kernels)
}

/// A count, as kernels take it.
fn int(count: usize) -> Result<i32> {
    i32::try_from(count).map_err(|_| {
        EngineError::Wrong(format!(
            "{count} is more than attention on a GPU can count; set train.micro_batch_size lower"
        ))
    })
}

impl Kernels {
    /// The arguments that follow the operands.
    fn shape(&self, arguments: Arguments, shape: Attention) -> Result<Arguments> {
        let arguments = arguments.int(int(shape.seq)?).int(int(shape.heads)?).int(int(shape.kv_heads)?);
        let arguments = match self.head_dim {
            Some(head_dim) => arguments.int(head_dim),
            None => arguments,
        };
        Ok(arguments.float(1.0 / (shape.head_dim as f32).sqrt()))
    }
}

/// Launches with a block for each of these heads of each sequence and each tile of its rows.
fn launch<D: Device>(device: &D, kernel: &Kernel, shape: Attention, heads: usize, arguments: &Arguments) -> Result<()> {
    let grid = [int(shape.batch * heads)?, int(shape.seq.div_ceil(kernel.rows))?, 1].map(i32::cast_unsigned);
    device.launch(kernel.name, grid, THREADS, int(kernel.shared)?.cast_unsigned(), arguments)
}

/// See [`crate::engine::Engine::attention`]; there is at least one position.
pub(super) fn forward<D: Device>(device: &D, on: Forward, precision: Precision, shape: Attention) -> Result<()> {
    let kernels = kernels(shape, precision, &[on.out, on.q, on.k, on.v])?;
    let operands = [on.out, on.log_sums, on.q, on.k, on.v];
    let arguments = operands.into_iter().fold(Arguments::new(), Arguments::pointer);
    launch(device, &kernels.forward, shape, shape.heads, &kernels.shape(arguments, shape)?)
}

/// See [`crate::engine::Engine::attention_backward`]; there is at least one position.
pub(super) fn backward<D: Device>(device: &D, on: Backward, precision: Precision, shape: Attention) -> Result<()> {
    let kernels = kernels(shape, precision, &[on.dq, on.dk, on.dv, on.dout, on.q, on.k, on.v])?;
    let delta = match precision {
        Precision::F32 => "attention_delta_f32",
        Precision::Bf16 => "attention_delta_bf16",
    };
    // A warp for each row.
    let rows = shape.batch * shape.seq * shape.heads;
    let blocks = int(rows.div_ceil(THREADS as usize / 32))?.cast_unsigned();
    let arguments = [on.scratch, on.dout, on.out].into_iter().fold(Arguments::new(), Arguments::pointer);
    let arguments = arguments.int(int(shape.batch)?).int(int(shape.seq)?).int(int(shape.heads)?);
    device.launch(delta, [blocks, 1, 1], THREADS, 0, &arguments.int(int(shape.head_dim)?))?;

    let read = [on.dout, on.log_sums, on.scratch, on.q, on.k, on.v];
    let operands = [on.dk, on.dv].into_iter().chain(read);
    let arguments = operands.fold(Arguments::new(), Arguments::pointer);
    launch(device, &kernels.keys, shape, shape.kv_heads, &kernels.shape(arguments, shape)?)?;
    let arguments = [on.dq].into_iter().chain(read).fold(Arguments::new(), Arguments::pointer);
    launch(device, &kernels.queries, shape, shape.heads, &kernels.shape(arguments, shape)?)
}
