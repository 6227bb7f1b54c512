//! The parts of worker/gpu-check.sh that are not the worker itself: each prints rows, and
//! `table` makes a table of them. A row that fails does not end the program otherwise than a
//! good one; the table tells.

mod collectives;
mod gpu;
mod ops;
mod row;
mod speed;
mod tokens;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use palingenesis_worker::engine::{Engine, Precision};

use gpu::Kind;
use row::{Row, State};

/// Parts of worker/gpu-check.sh.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Where is computed.
#[derive(Debug, clap::Args)]
struct Where {
    /// What with
    #[arg(long, value_enum, default_value = "cuda")]
    device: Kind,
    /// f32 or bf16
    #[arg(long, default_value = "f32", value_parser = precision)]
    dtype: Precision,
    /// As train.cuda_libraries
    #[arg(long)]
    libraries: Option<PathBuf>,
}

fn precision(word: &str) -> Result<Precision, String> {
    match word {
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        _ => Err("must be f32 or bf16".into()),
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Starts the device and says what it is
    Device {
        #[command(flatten)]
        at: Where,
    },
    /// Each operation beside the CPU's
    Ops {
        #[command(flatten)]
        at: Where,
        /// Small shapes only
        #[arg(long)]
        small: bool,
        /// How fast the large ones are, too; the GPU's name tells its peak
        #[arg(long, value_name = "GPU")]
        rates: Option<String>,
    },
    /// Collectives of one rank
    Nccl {
        #[command(flatten)]
        at: Where,
    },
    /// One training's losses beside another's
    Compare {
        /// What the row is called
        what: String,
        /// metrics.jsonl
        one: PathBuf,
        /// metrics.jsonl of the right one
        other: PathBuf,
        /// How many steps the first tells
        #[arg(long)]
        steps: u64,
        /// The largest relative difference
        #[arg(long)]
        bar: f64,
    },
    /// Tokens per second and MFU of a training
    Speed {
        config: PathBuf,
        /// Its metrics.jsonl
        metrics: PathBuf,
        /// The GPU's name
        gpu: String,
        /// What step.py printed
        #[arg(long)]
        torch: Option<PathBuf>,
    },
    /// Makes a text without meaning and its tokenizer
    Tokens {
        dir: PathBuf,
        #[arg(long)]
        vocab: u32,
        #[arg(long)]
        count: usize,
    },
    /// The table of all rows; 1 if one of them has failed
    Table { rows: PathBuf },
}

struct Ops {
    full: bool,
    rates: Option<String>,
}

impl gpu::Work for Ops {
    type Out = Vec<Row>;

    fn on<E: Engine>(self, engine: &E) -> Vec<Row> {
        let mut rows = ops::all(engine, self.full);
        if let Some(gpu) = self.rates {
            rows.extend(ops::rates(engine, speed::peak(&gpu)));
        }
        rows
    }
}

fn main() -> ExitCode {
    let rows = match Arguments::parse().command {
        Command::Device { at } => match gpu::describe(at.device, at.libraries.as_deref()) {
            Ok(text) => vec![Row::new("the device", text, "-", State::Ok)],
            Err(why) => vec![Row::failed("the device", why)],
        },
        Command::Ops { at, small, rates } => {
            let work = Ops { full: !small, rates };
            gpu::on(at.device, at.dtype, at.libraries.as_deref(), work)
                .unwrap_or_else(|why| vec![Row::failed(format!("operations, {}", ops::name(at.dtype)), why)])
        }
        Command::Nccl { at } => {
            let done = gpu::in_group(at.device, at.dtype, at.libraries.as_deref(), collectives::Collectives);
            done.unwrap_or_else(|why| vec![Row::failed("collectives", why)])
        }
        Command::Compare { what, one, other, steps, bar } => vec![speed::compare(&what, &one, &other, steps, bar)],
        Command::Speed { config, metrics, gpu, torch } => speed::speed(&config, &metrics, &gpu, torch.as_deref()),
        Command::Tokens { dir, vocab, count } => match tokens::write(&dir, vocab, count) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(why) => return failed(&why),
        },
        Command::Table { rows } => {
            let text = match std::fs::read_to_string(&rows) {
                Ok(text) => text,
                Err(error) => return failed(&format!("{}: {error}", rows.display())),
            };
            let (text, fits) = row::table(&text.lines().map(Row::parse).collect::<Vec<_>>());
            print!("{text}");
            return if fits { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
    };
    rows.iter().for_each(|row| println!("{row}"));
    ExitCode::SUCCESS
}

fn failed(why: &str) -> ExitCode {
    eprintln!("gpu_check: error: {why}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;
    use palingenesis_worker::engine::Cpu;
    use palingenesis_worker::model::Spec;

    #[test]
    fn a_row_comes_back_as_it_was_written_and_a_failure_shows_in_the_table() {
        let row = Row::new("what\tit is", "a | b", "1e-5", State::Skipped);
        let again = Row::parse(&row.to_string());
        assert_eq!(again, Row { what: "what it is".into(), ..row });
        let (text, fits) = row::table(&[again, Row::parse("half a line")]);
        assert!(
            text.ends_with(
                "| what it is | a \\| b | 1e-5 | SKIPPED |\n| a line of the check | half a line | - | FAILED |\n"
            ),
            "{text}"
        );
        assert!(!fits);
        assert!(!row::table(&[]).1, "nothing was checked");
    }

    /// Qwen/Qwen3-0.6B's config.json: 0.6 billion parameters, 0.44 billion of them beside the
    /// embedding (its model card). Meta-Llama-3-8B: 8,030,261,248.
    #[test]
    fn flops_are_torchtitans() {
        let spec = |config| Spec::from_hf(&config).unwrap();
        let qwen = spec(serde_json::json!({"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 3072, "tie_word_embeddings": true}));
        assert_eq!(qwen.parameters(), 596_049_920);
        assert_eq!(speed::flops_per_token(&qwen, 4096), 6.0 * 596_049_920.0 + 12.0 * 28.0 * 2048.0 * 4096.0);
        let llama = spec(serde_json::json!({"model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336}));
        let right = 6.0 * (8_030_261_248.0 - 128_256.0 * 4096.0) + 12.0 * 32.0 * 4096.0 * 8192.0;
        assert_eq!(speed::flops_per_token(&llama, 8192), right);
    }

    #[test]
    fn a_gpus_name_tells_its_peak() {
        let peak = |name| speed::peak(name).map(|peak| peak / 1e12);
        assert_eq!(peak("NVIDIA H200"), Some(989.0));
        assert_eq!(peak("NVIDIA H100 80GB HBM3"), Some(989.0));
        assert_eq!(peak("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(peak("NVIDIA H100 NVL"), Some(835.0));
        assert_eq!(peak("NVIDIA A100-SXM4-80GB"), Some(312.0));
        assert_eq!(peak("NVIDIA B200"), Some(2250.0));
        assert_eq!(peak("NVIDIA GeForce RTX 4090"), None);
    }

    #[test]
    fn the_processor_agrees_with_itself() {
        for row in ops::all(&Cpu::default(), false) {
            assert_eq!(row.state, State::Ok, "{row}");
        }
    }

    #[test]
    fn an_error_is_a_part_of_the_largest_number_and_no_number_is_infinitely_wrong() {
        assert_eq!(ops::error(&[1.0, -3.0], &[1.0, -4.0]), 0.25);
        assert_eq!(ops::error(&[f32::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(ops::error(&[], &[]), 0.0);
        assert_eq!(ops::rounded(&[1.0 + 1.0 / 256.0, 3.0], Precision::Bf16), [1.0, 3.0]);
    }

    #[test]
    fn collectives_of_one_rank_over_sockets_are_as_they_should_be() {
        let rows = gpu::in_group(Kind::Cpu, Precision::F32, None, collectives::Collectives).unwrap();
        assert_eq!(rows.len(), 4);
        rows.iter().for_each(|row| assert_eq!(row.state, State::Ok, "{row}"));
    }
}
