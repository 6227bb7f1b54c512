//! The operations on the processor, with the threads of this process's affinity.

use std::ops::Range;

use super::{AdamW, Attention, Engine, IGNORED, Matmul, Result};

/// The processor.
#[derive(Debug, Default)]
pub struct Cpu;

impl Engine for Cpu {
    type Buffer = Vec<f32>;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];
    type Tokens = Vec<u32>;

    fn zeros(&self, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }

    fn len(&self, buffer: &Vec<f32>) -> usize {
        buffer.len()
    }

    fn view<'a>(&self, buffer: &'a Vec<f32>, range: Range<usize>) -> &'a [f32] {
        &buffer[range]
    }

    fn view_mut<'a>(&self, buffer: &'a mut Vec<f32>, range: Range<usize>) -> &'a mut [f32] {
        &mut buffer[range]
    }

    fn part<'a>(&self, view: &'a [f32], range: Range<usize>) -> &'a [f32]
    where
        Self: 'a,
    {
        &view[range]
    }

    fn split<'a, const N: usize>(&self, view: &'a mut [f32], lengths: [usize; N]) -> [&'a mut [f32]; N]
    where
        Self: 'a,
    {
        let mut rest = view;
        lengths.map(|length| {
            let (first, other) = std::mem::take(&mut rest).split_at_mut(length);
            rest = other;
            first
        })
    }

    fn again<'a>(&self, view: &'a mut &mut [f32]) -> &'a mut [f32] {
        view
    }

    fn read<'a>(&self, view: &'a &mut [f32]) -> &'a [f32] {
        view
    }

    fn tokens(&self, ids: &[u32]) -> Result<Vec<u32>> {
        Ok(ids.to_vec())
    }

    fn upload(&self, to: &mut [f32], from: &[f32]) -> Result<()> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn download(&self, from: &[f32], to: &mut [f32]) -> Result<()> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn fill(&self, x: &mut [f32], value: f32) -> Result<()> {
        x.fill(value);
        Ok(())
    }

    fn copy(&self, y: &mut [f32], x: &[f32]) -> Result<()> {
        y.copy_from_slice(x);
        Ok(())
    }

    fn add(&self, y: &mut [f32], x: &[f32]) -> Result<()> {
        assert_eq!(y.len(), x.len());
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
        Ok(())
    }

    fn sum_of_squares(&self, x: &[f32]) -> Result<f64> {
        Ok(x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum())
    }

    fn matmul(&self, c: &mut [f32], a: &[f32], b: &[f32], how: Matmul) -> Result<()> {
        let Matmul { m, n, k, .. } = how;
        assert!(c.len() == m * n && a.len() == m * k && b.len() == k * n);
        for i in 0..m {
            for j in 0..n {
                let a = |l: usize| if how.a_transposed { a[l * m + i] } else { a[i * k + l] };
                let b = |l: usize| if how.b_transposed { b[j * k + l] } else { b[l * n + j] };
                let sum: f32 = (0..k).map(|l| a(l) * b(l)).sum();
                let to = &mut c[i * n + j];
                *to = how.alpha * sum + if how.accumulate { *to } else { 0.0 };
            }
        }
        Ok(())
    }

    fn rms_norm(&self, y: &mut [f32], inverse_rms: &mut [f32], x: &[f32], weight: &[f32], eps: f32) -> Result<()> {
        let width = weight.len();
        for ((y, x), inverse) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(inverse_rms) {
            let mean: f32 = x.iter().map(|x| x * x).sum::<f32>() / width as f32;
            *inverse = 1.0 / (mean + eps).sqrt();
            y.iter_mut().zip(x).zip(weight).for_each(|((y, x), w)| *y = x * *inverse * w);
        }
        Ok(())
    }

    fn rms_norm_backward(
        &self,
        dx: &mut [f32],
        dweight: &mut [f32],
        dy: &[f32],
        x: &[f32],
        weight: &[f32],
        inverse_rms: &[f32],
    ) -> Result<()> {
        let width = weight.len();
        let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width)).zip(x.chunks_exact(width)).zip(inverse_rms);
        for (((dx, dy), x), inverse) in rows {
            let dot: f32 = dy.iter().zip(weight).zip(x).map(|((dy, w), x)| dy * w * x).sum();
            let along = dot * inverse * inverse * inverse / width as f32;
            for i in 0..width {
                dx[i] += dy[i] * weight[i] * inverse - x[i] * along;
                dweight[i] += dy[i] * x[i] * inverse;
            }
        }
        Ok(())
    }

    fn rope(&self, x: &mut [f32], table: &[f32], heads: usize, head_dim: usize, back: bool) -> Result<()> {
        let half = head_dim / 2;
        for (position, at) in x.chunks_exact_mut(heads * head_dim).zip(table.chunks_exact(head_dim).cycle()) {
            let (cos, sin) = at.split_at(half);
            for head in position.chunks_exact_mut(head_dim) {
                let (real, imaginary) = head.split_at_mut(half);
                for i in 0..half {
                    let (r, j, s) = (real[i], imaginary[i], if back { -sin[i] } else { sin[i] });
                    real[i] = r * cos[i] - j * s;
                    imaginary[i] = j * cos[i] + r * s;
                }
            }
        }
        Ok(())
    }

    fn attention(
        &self,
        out: &mut [f32],
        log_sums: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Attention,
    ) -> Result<()> {
        let at = Places(shape);
        for (b, h, t) in at.all() {
            let scores = at.scores(q, k, b, h, t);
            let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = scores.iter().map(|score| (score - highest).exp()).sum();
            let log_sum = sum.ln() + highest;
            log_sums[(b * shape.heads + h) * shape.seq + t] = log_sum;
            let out = &mut out[at.q(b, t, h)];
            out.fill(0.0);
            for (s, score) in scores.iter().enumerate() {
                let p = (score - log_sum).exp();
                out.iter_mut().zip(&v[at.kv(b, s, h)]).for_each(|(out, v)| *out += p * v);
            }
        }
        Ok(())
    }

    fn attention_backward(
        &self,
        dq: &mut [f32],
        dk: &mut [f32],
        dv: &mut [f32],
        dout: &[f32],
        out: &[f32],
        log_sums: &[f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Attention,
    ) -> Result<()> {
        let at = Places(shape);
        let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        [&mut *dq, &mut *dk, &mut *dv].into_iter().for_each(|to| to.fill(0.0));
        for (b, h, t) in at.all() {
            let (here, log_sum) = (at.q(b, t, h), log_sums[(b * shape.heads + h) * shape.seq + t]);
            let own = dot(&dout[here.clone()], &out[here.clone()]);
            for (s, score) in at.scores(q, k, b, h, t).iter().enumerate() {
                let (p, there) = ((score - log_sum).exp(), at.kv(b, s, h));
                let ds = p * (dot(&dout[here.clone()], &v[there.clone()]) - own) * scale;
                for i in 0..shape.head_dim {
                    dv[there.start + i] += p * dout[here.start + i];
                    dq[here.start + i] += ds * k[there.start + i];
                    dk[there.start + i] += ds * q[here.start + i];
                }
            }
        }
        Ok(())
    }

    fn swiglu(&self, out: &mut [f32], gate: &[f32], up: &[f32]) -> Result<()> {
        out.iter_mut().zip(gate).zip(up).for_each(|((out, g), u)| *out = g / (1.0 + (-g).exp()) * u);
        Ok(())
    }

    fn swiglu_backward(&self, gate: &mut [f32], up: &mut [f32], dout: &[f32]) -> Result<()> {
        for ((g, u), d) in gate.iter_mut().zip(up).zip(dout) {
            let sigmoid = 1.0 / (1.0 + (-*g).exp());
            let silu = *g * sigmoid;
            let dgate = d * *u * sigmoid * (1.0 + *g * (1.0 - sigmoid));
            *u = d * silu;
            *g = dgate;
        }
        Ok(())
    }

    fn embedding(&self, out: &mut [f32], table: &[f32], tokens: &Vec<u32>) -> Result<()> {
        let width = out.len() / tokens.len().max(1);
        for (out, token) in out.chunks_exact_mut(width.max(1)).zip(tokens) {
            out.copy_from_slice(&table[*token as usize * width..][..width]);
        }
        Ok(())
    }

    fn embedding_backward(&self, dtable: &mut [f32], dout: &[f32], tokens: &Vec<u32>) -> Result<()> {
        let width = dout.len() / tokens.len().max(1);
        for (dout, token) in dout.chunks_exact(width.max(1)).zip(tokens) {
            dtable[*token as usize * width..][..width].iter_mut().zip(dout).for_each(|(to, d)| *to += d);
        }
        Ok(())
    }

    fn cross_entropy(
        &self,
        logits: &mut [f32],
        targets: &Vec<u32>,
        first: usize,
        rows: usize,
        scale: f32,
    ) -> Result<f64> {
        let width = logits.len() / rows.max(1);
        let mut loss = 0.0;
        for (row, target) in logits.chunks_exact_mut(width.max(1)).zip(&targets[first..first + rows]) {
            if *target == IGNORED {
                row.fill(0.0);
                continue;
            }
            let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = row.iter().map(|x| (x - highest).exp()).sum();
            loss += f64::from(sum.ln() + highest - row[*target as usize]);
            row.iter_mut().for_each(|x| *x = (*x - highest).exp() / sum * scale);
            row[*target as usize] -= scale;
        }
        Ok(loss)
    }

    fn adamw(&self, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], how: AdamW) -> Result<()> {
        let AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale } = how;
        let step = step as i32;
        let (first, second) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
        for (((p, g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
            let g = g * grad_scale;
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            *p -= lr * weight_decay * *p;
            *p -= lr * (*m / first) / ((*v / second).sqrt() + eps);
        }
        Ok(())
    }
}

/// Where heads lie.
struct Places(Attention);

impl Places {
    fn all(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let Attention { batch, seq, heads, .. } = self.0;
        (0..batch * heads * seq).map(move |i| (i / (heads * seq), i / seq % heads, i % seq))
    }

    fn q(&self, b: usize, t: usize, h: usize) -> Range<usize> {
        let start = ((b * self.0.seq + t) * self.0.heads + h) * self.0.head_dim;
        start..start + self.0.head_dim
    }

    fn kv(&self, b: usize, t: usize, h: usize) -> Range<usize> {
        let h = h / (self.0.heads / self.0.kv_heads);
        let start = ((b * self.0.seq + t) * self.0.kv_heads + h) * self.0.head_dim;
        start..start + self.0.head_dim
    }

    fn scores(&self, q: &[f32], k: &[f32], b: usize, h: usize, t: usize) -> Vec<f32> {
        let scale = 1.0 / (self.0.head_dim as f32).sqrt();
        let q = &q[self.q(b, t, h)];
        let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>();
        (0..=t).map(|s| dot(&k[self.kv(b, s, h)]) * scale).collect()
    }
}
