//! The operations of [`Engine`] by the kernels: which one, over how many blocks, with what.
//! Lengths and precisions are checked here; what a kernel computes stands in its own file.

use std::borrow::Cow;
use std::ops::Range;

use super::device::{Arguments, Device, Gemm};
use super::{Buffer, Cuda, Sum, Tokens, View, ViewMut, attention};
use crate::engine::{AdamW, Attention, Engine, Matmul, Precision, Result, check_tokens};

/// Threads of a block, where a kernel does not say otherwise.
const THREADS: u32 = 256;

/// Blocks that add up squares; each has a place in the scratch memory.
const SUMS: u32 = 512;

/// Rows up to this width are a warp's, wider ones a block's.
const NARROW: usize = 1024;

/// Warps of a block.
const WARPS: usize = 8;

/// One kernel's name by precision.
fn by(precision: Precision, [f32, bf16]: [&'static str; 2]) -> &'static str {
    match precision {
        Precision::F32 => f32,
        Precision::Bf16 => bf16,
    }
}

/// How many rows of `width` there are.
fn rows(len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "{len} numbers in rows of {width}");
    len / width
}

fn int(number: usize) -> i32 {
    i32::try_from(number).unwrap_or_else(|_| panic!("{number} is more than a kernel takes"))
}

fn long(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn blocks(number: usize) -> u32 {
    u32::try_from(number).unwrap_or_else(|_| panic!("{number} blocks are more than a GPU takes"))
}

impl<D: Device> Cuda<D> {
    /// A kernel whose threads go through `len` numbers.
    fn each(&self, kernel: &'static str, len: usize, arguments: &Arguments) -> Result<()> {
        let most = self.device.processors() as usize * 16;
        let grid = len.div_ceil(THREADS as usize * 8).clamp(1, most.max(1));
        self.device.launch(kernel, [blocks(grid), 1, 1], THREADS, 0, arguments)
    }

    /// Adds `count` sums in the scratch memory to one.
    fn add_sums(&self, kernel: &'static str, sum: &mut Sum<D>, scratch: u64, count: usize) -> Result<()> {
        let arguments = Arguments::new().pointer(D::address(&sum.0)).pointer(scratch).int(int(count));
        self.device.launch(kernel, [1, 1, 1], THREADS, 0, &arguments)
    }

    fn same(&self, views: &[(Precision, usize)], precision: Precision, len: usize) {
        assert!(views.iter().all(|view| *view == (precision, len)), "{views:?}, not {len} of {precision:?}");
    }
}

/// What is compared of a view.
macro_rules! kinds {
    ($($view:expr),+) => { &[$(($view.precision, $view.len)),+] };
}

impl<D: Device> Engine for Cuda<D> {
    type Buffer = Buffer<D>;
    type View<'a>
        = View<'a>
    where
        Self: 'a;
    type ViewMut<'a>
        = ViewMut<'a>
    where
        Self: 'a;
    type Tokens = Tokens<D>;
    type Sum = Sum<D>;

    fn compute(&self) -> Precision {
        self.precision
    }

    fn loss_chunk(&self) -> usize {
        4096
    }

    fn warning(&self, head_dim: usize) -> Option<String> {
        if attention::is_tensor(head_dim, self.precision) {
            return None;
        }
        let precision = if self.precision == Precision::F32 { "f32" } else { "bf16" };
        Some(format!(
            "attention is computed without tensor cores, which is much slower: they are for heads of 64 and 128 in bf16, \
             these are of {head_dim} in {precision}"
        ))
    }

    fn memory_in_use(&self) -> Option<u64> {
        self.device.memory_in_use()
    }

    fn zeros(&self, len: usize, precision: Precision) -> Result<Buffer<D>> {
        assert!(precision == Precision::F32 || precision == self.precision, "this engine computes in f32");
        let memory = if len == 0 { None } else { Some(self.device.allocate(len.saturating_mul(precision.bytes()))?) };
        Ok(Buffer { memory, len, precision })
    }

    fn sum(&self) -> Result<Sum<D>> {
        Ok(Sum(self.device.allocate(size_of::<f64>())?))
    }

    fn take(&self, sum: &mut Sum<D>) -> Result<f64> {
        let mut bytes = [0; size_of::<f64>()];
        self.device.read(D::address(&sum.0), &mut bytes)?;
        self.device.set(D::address(&sum.0), bytes.len(), 0)?;
        Ok(f64::from_ne_bytes(bytes))
    }

    fn len(&self, buffer: &Buffer<D>) -> usize {
        buffer.len
    }

    fn view_len(&self, view: View<'_>) -> usize {
        view.len
    }

    fn view<'a>(&self, buffer: &'a Buffer<D>, range: Range<usize>) -> View<'a> {
        let all = View {
            address: buffer.address(),
            len: buffer.len,
            precision: buffer.precision,
            buffer: super::PhantomData,
        };
        View { address: all.at(&range), len: range.len(), ..all }
    }

    fn view_mut<'a>(&self, buffer: &'a mut Buffer<D>, range: Range<usize>) -> ViewMut<'a> {
        let all = ViewMut {
            address: buffer.address(),
            len: buffer.len,
            precision: buffer.precision,
            buffer: super::PhantomData,
        };
        ViewMut { address: all.at(&range), len: range.len(), ..all }
    }

    fn part<'a>(&self, view: View<'a>, range: Range<usize>) -> View<'a>
    where
        Self: 'a,
    {
        View { address: view.at(&range), len: range.len(), ..view }
    }

    fn split<'a, const N: usize>(&self, view: ViewMut<'a>, lengths: [usize; N]) -> [ViewMut<'a>; N]
    where
        Self: 'a,
    {
        let mut end = 0;
        lengths.map(|length| {
            end += length;
            let address = view.at(&(end - length..end));
            ViewMut { address, len: length, precision: view.precision, buffer: super::PhantomData }
        })
    }

    fn again<'a>(&self, view: &'a mut ViewMut<'_>) -> ViewMut<'a> {
        ViewMut { buffer: super::PhantomData, ..*view }
    }

    fn read<'a>(&self, view: &'a ViewMut<'_>) -> View<'a> {
        view.read()
    }

    fn tokens(&self, ids: &[u32]) -> Result<Tokens<D>> {
        let home = std::rc::Rc::downgrade(&self.pool);
        let bytes = size_of_val(ids);
        if bytes == 0 {
            return Ok(Tokens { memory: None, ids: Vec::new(), home });
        }
        let free = {
            let mut pool = self.pool.borrow_mut();
            pool.iter().position(|(_, size)| *size >= bytes).map(|at| pool.swap_remove(at))
        };
        let memory = match free {
            Some(memory) => memory,
            None => (self.device.allocate(bytes)?, bytes),
        };
        self.device.write(D::address(&memory.0), zerocopy::IntoBytes::as_bytes(ids))?;
        Ok(Tokens { memory: Some(memory), ids: ids.to_vec(), home })
    }

    fn upload(&self, to: ViewMut<'_>, from: &[f32]) -> Result<()> {
        self.to_device(&to, from)
    }

    fn download(&self, from: View<'_>, to: &mut [f32]) -> Result<()> {
        self.to_host(from, to)
    }

    fn host<'a>(&self, view: View<'a>) -> Result<Cow<'a, [f32]>>
    where
        Self: 'a,
    {
        let mut numbers = vec![0.0; view.len];
        self.to_host(view, &mut numbers)?;
        Ok(Cow::Owned(numbers))
    }

    fn with_host<R>(&self, views: Vec<ViewMut<'_>>, write: impl FnOnce(&mut [&mut [f32]]) -> R) -> Result<R> {
        let mut numbers: Vec<Vec<f32>> = views.iter().map(|view| vec![0.0; view.len]).collect();
        let result = write(&mut numbers.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        for (view, numbers) in views.iter().zip(&numbers) {
            self.to_device(view, numbers)?;
        }
        Ok(result)
    }

    fn fill(&self, x: ViewMut<'_>, value: f32) -> Result<()> {
        if x.len == 0 {
            return Ok(());
        }
        if value.to_bits() == 0 {
            return self.device.set(x.address, x.len * x.precision.bytes(), 0);
        }
        let kernel = by(x.precision, ["fill_f32", "fill_bf16"]);
        self.each(kernel, x.len, &Arguments::new().pointer(x.address).long(long(x.len)).float(value))
    }

    fn copy(&self, y: ViewMut<'_>, x: View<'_>) -> Result<()> {
        assert_eq!(y.len, x.len);
        if x.len == 0 {
            return Ok(());
        }
        let kernel = match (y.precision, x.precision) {
            (Precision::Bf16, Precision::F32) => "cast_to_bf16",
            (Precision::F32, Precision::Bf16) => "cast_to_f32",
            _ => return self.device.copy(y.address, x.address, x.len * x.precision.bytes()),
        };
        self.each(kernel, x.len, &Arguments::new().pointer(y.address).pointer(x.address).long(long(x.len)))
    }

    fn add(&self, y: ViewMut<'_>, x: View<'_>) -> Result<()> {
        assert_eq!(y.len, x.len);
        if x.len == 0 {
            return Ok(());
        }
        let kernel = match y.precision {
            Precision::F32 => by(x.precision, ["add_f32_f32", "add_f32_bf16"]),
            Precision::Bf16 => by(x.precision, ["add_bf16_f32", "add_bf16_bf16"]),
        };
        self.each(kernel, x.len, &Arguments::new().pointer(y.address).pointer(x.address).long(long(x.len)))
    }

    fn sum_of_squares(&self, sum: &mut Sum<D>, x: View<'_>) -> Result<()> {
        if x.len == 0 {
            return Ok(());
        }
        let scratch = self.scratch(SUMS as usize * size_of::<f64>())?;
        let kernel = by(x.precision, ["sum_of_squares_f32", "sum_of_squares_bf16"]);
        let arguments = Arguments::new().pointer(scratch).pointer(x.address).long(long(x.len));
        self.device.launch(kernel, [SUMS, 1, 1], THREADS, 0, &arguments)?;
        self.add_sums("add_sum_f64", sum, scratch, SUMS as usize)
    }

    fn matmul(&self, c: ViewMut<'_>, a: View<'_>, b: View<'_>, how: Matmul) -> Result<()> {
        let Matmul { m, n, k, accumulate, .. } = how;
        assert!(c.len == m * n && a.len == m * k && b.len == k * n, "{how:?}");
        let precision = a.precision;
        assert!(b.precision == precision && [precision, Precision::F32].contains(&c.precision), "{how:?}");
        if c.len == 0 {
            return Ok(());
        }
        if k == 0 {
            return if accumulate { Ok(()) } else { self.fill(c, 0.0) };
        }
        let (c_precision, c) = (c.precision, c.address);
        self.device.gemm(&Gemm { how, c, c_precision, a: a.address, b: b.address, precision })
    }

    fn rms_norm(
        &self,
        y: ViewMut<'_>,
        inverse_rms: ViewMut<'_>,
        x: View<'_>,
        weight: View<'_>,
        eps: f32,
    ) -> Result<()> {
        let width = weight.len;
        let rows = rows(x.len, width);
        self.same(kinds![y, x], x.precision, x.len);
        self.same(kinds![weight], x.precision, width);
        self.same(kinds![inverse_rms], Precision::F32, rows);
        if rows == 0 {
            return Ok(());
        }
        let (kernel, grid) = match width <= NARROW {
            true => (["rms_norm_narrow_f32", "rms_norm_narrow_bf16"], rows.div_ceil(WARPS)),
            false => (["rms_norm_f32", "rms_norm_bf16"], rows),
        };
        let arguments = Arguments::new().pointer(y.address).pointer(inverse_rms.address).pointer(x.address);
        let arguments = arguments.pointer(weight.address).long(long(rows)).int(int(width)).float(eps);
        self.device.launch(by(x.precision, kernel), [blocks(grid), 1, 1], THREADS, 0, &arguments)
    }

    fn rms_norm_backward(
        &self,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
        dy: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        inverse_rms: View<'_>,
    ) -> Result<()> {
        let width = weight.len;
        let rows = rows(x.len, width);
        self.same(kinds![dx, dy, x], x.precision, x.len);
        self.same(kinds![weight], x.precision, width);
        self.same(kinds![inverse_rms], Precision::F32, rows);
        assert_eq!(dweight.len, width);
        if rows == 0 {
            return Ok(());
        }
        // Each block adds up its rows' part of dweight; their sums are added in order.
        let narrow = width <= NARROW;
        let grid = rows.div_ceil(WARPS).min(self.device.processors() as usize * 4);
        let each = rows.div_ceil(grid);
        let grid = rows.div_ceil(each);
        let partial = self.scratch(grid * width * size_of::<f32>())?;
        let (kernel, shared) = match narrow {
            true => (["rms_norm_backward_narrow_f32", "rms_norm_backward_narrow_bf16"], WARPS * width),
            false => (["rms_norm_backward_f32", "rms_norm_backward_bf16"], width),
        };
        let arguments = Arguments::new().pointer(dx.address).pointer(partial).pointer(dy.address).pointer(x.address);
        let arguments = arguments.pointer(weight.address).pointer(inverse_rms.address);
        let arguments = arguments.long(long(rows)).int(int(width)).int(int(each));
        let shared = blocks(shared * size_of::<f32>());
        self.device.launch(by(x.precision, kernel), [blocks(grid), 1, 1], THREADS, shared, &arguments)?;
        let arguments = Arguments::new().pointer(dweight.address).pointer(partial).int(int(grid)).int(int(width));
        let kernel = by(dweight.precision, ["column_sum_f32", "column_sum_bf16"]);
        self.device.launch(kernel, [blocks(width.div_ceil(32)), 1, 1], THREADS, 0, &arguments)
    }

    fn rope(&self, x: ViewMut<'_>, table: View<'_>, heads: usize, head_dim: usize, back: bool) -> Result<()> {
        assert!(heads > 0 && head_dim > 0 && head_dim.is_multiple_of(2));
        let (positions, seq) = (rows(x.len, heads * head_dim), rows(table.len, head_dim));
        assert!(positions == 0 || seq > 0 && positions.is_multiple_of(seq), "{positions} positions of {seq}");
        self.same(kinds![table], Precision::F32, table.len);
        if positions == 0 {
            return Ok(());
        }
        let arguments = Arguments::new().pointer(x.address).pointer(table.address).long(long(positions));
        let arguments = arguments.int(int(seq)).int(int(heads)).int(int(head_dim)).int(i32::from(back));
        self.each(by(x.precision, ["rope_f32", "rope_bf16"]), x.len / 2, &arguments)
    }

    fn attention(
        &self,
        out: ViewMut<'_>,
        log_sums: ViewMut<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        shape: Attention,
    ) -> Result<()> {
        let Attention { batch, seq, heads, kv_heads, head_dim } = shape;
        assert!(kv_heads > 0 && head_dim > 0 && heads.is_multiple_of(kv_heads), "{shape:?}");
        let precision = q.precision;
        self.same(kinds![out, q], precision, batch * seq * heads * head_dim);
        self.same(kinds![k, v], precision, batch * seq * kv_heads * head_dim);
        self.same(kinds![log_sums], Precision::F32, batch * heads * seq);
        if batch * seq == 0 {
            return Ok(());
        }
        let operands = attention::Forward {
            out: out.address,
            log_sums: log_sums.address,
            q: q.address,
            k: k.address,
            v: v.address,
        };
        attention::forward(&self.device, operands, precision, shape)
    }

    fn attention_backward(
        &self,
        dq: ViewMut<'_>,
        dk: ViewMut<'_>,
        dv: ViewMut<'_>,
        dout: View<'_>,
        out: View<'_>,
        log_sums: View<'_>,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        shape: Attention,
    ) -> Result<()> {
        let Attention { batch, seq, heads, kv_heads, head_dim } = shape;
        assert!(kv_heads > 0 && head_dim > 0 && heads.is_multiple_of(kv_heads), "{shape:?}");
        let precision = q.precision;
        self.same(kinds![dq, dout, out, q], precision, batch * seq * heads * head_dim);
        self.same(kinds![dk, dv, k, v], precision, batch * seq * kv_heads * head_dim);
        self.same(kinds![log_sums], Precision::F32, batch * heads * seq);
        if batch * seq == 0 {
            return Ok(());
        }
        let scratch = self.scratch(attention::scratch_bytes(shape, precision))?;
        let operands = attention::Backward {
            dq: dq.address,
            dk: dk.address,
            dv: dv.address,
            dout: dout.address,
            out: out.address,
            log_sums: log_sums.address,
            q: q.address,
            k: k.address,
            v: v.address,
            scratch,
        };
        attention::backward(&self.device, operands, precision, shape)
    }

    fn swiglu(&self, out: ViewMut<'_>, gate: View<'_>, up: View<'_>) -> Result<()> {
        self.same(kinds![gate, up], out.precision, out.len);
        if out.len == 0 {
            return Ok(());
        }
        let arguments = Arguments::new().pointer(out.address).pointer(gate.address).pointer(up.address);
        self.each(by(out.precision, ["swiglu_f32", "swiglu_bf16"]), out.len, &arguments.long(long(out.len)))
    }

    fn swiglu_backward(&self, gate: ViewMut<'_>, up: ViewMut<'_>, dout: View<'_>) -> Result<()> {
        self.same(kinds![gate, up], dout.precision, dout.len);
        if dout.len == 0 {
            return Ok(());
        }
        let arguments = Arguments::new().pointer(gate.address).pointer(up.address).pointer(dout.address);
        let kernel = by(dout.precision, ["swiglu_backward_f32", "swiglu_backward_bf16"]);
        self.each(kernel, dout.len, &arguments.long(long(dout.len)))
    }

    fn embedding(&self, out: ViewMut<'_>, table: View<'_>, tokens: &Tokens<D>) -> Result<()> {
        if tokens.ids.is_empty() {
            return Ok(());
        }
        let width = rows(out.len, tokens.ids.len());
        check_tokens(tokens.ids.iter(), rows(table.len, width))?;
        assert_eq!(out.precision, table.precision);
        let arguments = Arguments::new().pointer(out.address).pointer(table.address).pointer(tokens.address());
        let arguments = arguments.long(long(tokens.ids.len())).int(int(width));
        let kernel = by(out.precision, ["embedding_f32", "embedding_bf16"]);
        self.device.launch(kernel, [blocks(tokens.ids.len()), 1, 1], THREADS, 0, &arguments)
    }

    fn embedding_backward(&self, dtable: ViewMut<'_>, dout: View<'_>, tokens: &Tokens<D>) -> Result<()> {
        if tokens.ids.is_empty() {
            return Ok(());
        }
        let width = rows(dout.len, tokens.ids.len());
        check_tokens(tokens.ids.iter(), rows(dtable.len, width))?;
        let kernel = match (dout.precision, dtable.precision) {
            (Precision::F32, Precision::F32) => "embedding_backward_f32_f32",
            (Precision::Bf16, Precision::F32) => "embedding_backward_bf16_f32",
            (Precision::Bf16, Precision::Bf16) => "embedding_backward_bf16_bf16",
            (Precision::F32, Precision::Bf16) => panic!("gradients are stored as what is computed with, or as f32"),
        };
        let arguments = Arguments::new().pointer(dtable.address).pointer(dout.address).pointer(tokens.address());
        let arguments = arguments.int(int(tokens.ids.len())).int(int(width));
        self.device.launch(kernel, [blocks(tokens.ids.len()), 1, 1], THREADS, 0, &arguments)
    }

    fn cross_entropy(
        &self,
        sum: &mut Sum<D>,
        logits: ViewMut<'_>,
        targets: &Tokens<D>,
        first: usize,
        rows: usize,
        scale: f32,
    ) -> Result<()> {
        let ids = &targets.ids[first..first + rows];
        if rows == 0 {
            return Ok(());
        }
        let vocab = self::rows(logits.len, rows);
        check_tokens(ids.iter().filter(|target| **target != crate::engine::IGNORED), vocab)?;
        let losses = self.scratch(rows * size_of::<f32>())?;
        let own = targets.address() + (first * size_of::<u32>()) as u64;
        let arguments = Arguments::new().pointer(logits.address).pointer(losses).pointer(own);
        let arguments = arguments.int(int(rows)).int(int(vocab)).float(scale);
        let kernel = by(logits.precision, ["cross_entropy_f32", "cross_entropy_bf16"]);
        self.device.launch(kernel, [blocks(rows), 1, 1], 1024, 0, &arguments)?;
        self.add_sums("add_sum_f32", sum, losses, rows)
    }

    fn adamw(&self, param: ViewMut<'_>, grad: View<'_>, m: ViewMut<'_>, v: ViewMut<'_>, how: AdamW) -> Result<()> {
        self.same(kinds![param, grad, m, v], Precision::F32, param.len);
        assert!(how.step > 0);
        if param.len == 0 {
            return Ok(());
        }
        let factors = how.factors();
        let arguments = Arguments::new().pointer(param.address).pointer(grad.address);
        let arguments = arguments.pointer(m.address).pointer(v.address).long(long(param.len));
        let arguments = arguments.float(factors.keep).float(factors.size).float(factors.root).float(factors.beta1);
        let arguments = arguments.float(factors.new1).float(factors.beta2).float(factors.new2).float(factors.eps);
        self.each("adamw", param.len, &arguments.float(how.grad_scale))
    }
}
