//! The learning rate.

use crate::config::TrainConfig;

/// The learning rate of a step, counted from 1: linear from 0 to `lr` over `warmup_steps`,
/// then half a cosine down to `min_lr` at the last step.
#[must_use]
pub fn learning_rate(config: &TrainConfig, step: u64) -> f64 {
    let TrainConfig { lr, min_lr, warmup_steps, steps, .. } = *config;
    if step <= warmup_steps {
        return lr * step as f64 / warmup_steps as f64;
    }
    let done = (step.min(steps) - warmup_steps.min(steps)) as f64 / (steps.saturating_sub(warmup_steps)).max(1) as f64;
    min_lr + (lr - min_lr) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::path::Path;

    fn config(more: &str) -> TrainConfig {
        let text = format!(
            "model:\n  path: m\ndata:\n  path: d\ntrain:\n  output_dir: o\n  seq_len: 8\n  global_batch_size: 4\n{more}"
        );
        Config::parse(Path::new("x.yaml"), &text, &[], &|_| None).unwrap().train
    }

    /// After the warm-up it is torch.optim.lr_scheduler.CosineAnnealingLR's closed form:
    /// eta_min + (eta_max - eta_min) (1 + cos(pi T_cur / T_max)) / 2, in steps of 25 %.
    #[test]
    fn rises_to_lr_and_falls_to_min_lr() {
        let config = config("  steps: 110\n  warmup_steps: 10\n  lr: 1.0\n  min_lr: 0.2\n");
        let expected = [(1, 0.1), (5, 0.5), (10, 1.0), (35, 0.882_842_712), (60, 0.6), (85, 0.317_157_288), (110, 0.2)];
        for (step, expected) in expected {
            let lr = learning_rate(&config, step);
            assert!((lr - expected).abs() < 1e-9, "step {step}: {lr} instead of {expected}");
        }
        assert!((learning_rate(&config, 1000) - 0.2).abs() < 1e-12, "after the last step");
    }

    #[test]
    fn needs_no_warm_up_and_no_end() {
        let all_warm = config("  steps: 4\n  warmup_steps: 4\n  lr: 1.0\n");
        assert_eq!([1, 2, 3, 4].map(|step| learning_rate(&all_warm, step)), [0.25, 0.5, 0.75, 1.0]);
        let flat = config("  steps: 4\n  lr: 1.0\n  min_lr: 1.0\n");
        assert_eq!([1, 4].map(|step| learning_rate(&flat, step)), [1.0, 1.0]);
    }
}
