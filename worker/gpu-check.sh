#!/usr/bin/env bash
# Checks on one GPU what else is checked with stand-ins: each operation beside the CPU's, NCCL
# of one rank, trainings beside the CPU's, checkpoints from GPU to CPU and back, and the speed
# of a model of Qwen3-0.6B's shape, beside PyTorch's where that is there. Needs no network and
# less than 8 minutes. Prints a table, which is in $OUT/gpu-check.md, too, if OUT is set.
#
#   cargo build --release -p palingenesis-worker --bins --examples    # anywhere, with this glibc or an older one
#   worker/gpu-check.sh                                               # on the machine with the GPU
#
# Ends with 0 if nothing has FAILED, with 77 where there is no GPU, else with 1.
#
# PALINGENESIS_WORKER, GPU_CHECK    the two programs, else those of target/release
# CUDA_LIBRARIES                    as train.cuda_libraries
# PYTHON                            a Python that has torch, else python3
# OUT                               a directory for the table and the logs
# GPU_CHECK_DEVICE=cpu              tries this script itself where there is no GPU: small, and says nothing of one
# GPU_CHECK_SECONDS                 for everything, else 470
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../target}
worker=${PALINGENESIS_WORKER:-$target/release/palingenesis-worker}
check=${GPU_CHECK:-$target/release/examples/gpu_check}
python=${PYTHON:-python3}
device=${GPU_CHECK_DEVICE:-cuda}
limit=${GPU_CHECK_SECONDS:-470}

# The name is for the peak of the MFU; the driver shows its GPUs in /proc, too.
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 2>/dev/null | head -n 1)
[ -n "$gpu" ] || gpu=$(sed -n 's/^Model:[[:space:]]*//p' /proc/driver/nvidia/gpus/*/information 2>/dev/null | head -n 1)
[ "$device" = cuda ] || gpu="no GPU"
if [ -z "$gpu" ]; then
    echo "gpu-check: there is no GPU here: nvidia-smi names none, and /proc/driver/nvidia/gpus has none" >&2
    exit 77
fi
for program in "$worker" "$check"; do
    if [ ! -x "$program" ]; then
        echo "gpu-check: $program is not there; cargo build --release -p palingenesis-worker --bins --examples makes it" >&2
        exit 1
    fi
done

work=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
mkdir -p "$work/logs"
rows=$work/rows
: >"$rows"
libraries=()
keys=()
if [ -n "${CUDA_LIBRARIES:-}" ]; then
    libraries=(--libraries "$CUDA_LIBRARIES")
    keys=("train.cuda_libraries=$CUDA_LIBRARIES")
fi
# One rank each, whatever this runs in.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_STEP_NUM_TASKS SLURM_LOCALID

row() { # row WHAT VALUE BAR STATE
    printf '%s\t%s\t%s\t%s\n' "${1//$'\t'/ }" "${2//[$'\t\n']/ }" "$3" "$4" >>"$rows"
}

left() {
    echo $((limit - SECONDS))
}

# attempt NAME SECONDS COMMAND...: within its time and what is left of all; its standard error, and
# how it ended, are in the log.
attempt() {
    local name=$1 most=$2 code
    shift 2
    [ "$most" -le "$(left)" ] || most=$(left)
    if [ "$most" -lt 5 ]; then
        echo "no time is left of $limit s" >"$work/logs/$name.log"
        return 1
    fi
    echo "gpu-check: $name" >&2
    timeout -k 5 "$most" "$@" 2>"$work/logs/$name.log"
    code=$?
    [ "$code" -ne 124 ] && [ "$code" -ne 137 ] || echo "not over within $most s" >>"$work/logs/$name.log"
    return "$code"
}

# What the log of a part says last.
why() {
    local line
    line=$(grep -v '^[[:space:]]*$' "$work/logs/$1.log" | tail -n 1 | cut -c 1-300)
    echo "${line:-it ended without a word}"
}

# part NAME SECONDS COMMAND...: prints rows.
part() {
    local name=$1
    attempt "$@" >>"$rows" || row "$name" "$(why "$name")" - FAILED
}

# training NAME SECONDS OVERRIDE...: with the worker, into its own directory; a row only where it fails.
training() {
    local name=$1 most=$2
    shift 2
    attempt "$name" "$most" "$worker" "$work/$config.toml" "train.output_dir=$work/$name" "$@" \
        >"$work/logs/$name.out" && return
    row "training $name" "$(why "$name")" - FAILED
    return 1
}

# Tokens of a whole vocabulary, of a text without meaning.
tokens() { # tokens NAME VOCAB COUNT
    local step=$1
    if attempt "$step" 60 "$check" tokens "$work/$1-text" --vocab "$2" --count "$3"; then
        step=$1-prepare
        attempt "$step" 60 "$worker" prepare --tokenizer "$work/$1-text" --eos '<|endoftext|>' --out "$work/$1" \
            "$work/$1-text/text.txt" >/dev/null && return
    fi
    row "tokens for $1" "$(why "$step")" - FAILED
    return 1
}

### The device, its operations, its collectives.

part device 90 "$check" device --device "$device" "${libraries[@]}"
if [ "$device" = cuda ]; then
    part ops-f32 90 "$check" ops --device cuda --dtype f32 "${libraries[@]}"
    part ops-bf16 90 "$check" ops --device cuda --dtype bf16 --rates "$gpu" "${libraries[@]}"
    part nccl 60 "$check" nccl --device cuda --dtype bf16 "${libraries[@]}"
else
    part ops-f32 90 "$check" ops --device cpu --small
    part nccl 60 "$check" nccl --device cpu
fi
row "collectives beside computing" "needs two GPUs" - SKIPPED

### A small model, on the GPU beside the CPU: 100 steps with the same seed and data. The rate is
### constant, so that a training that ends earlier takes the same steps.

text=$here/../README.md
[ -r "$text" ] || text=$here/gpu-check.sh
steps=100
[ "$device" = cuda ] || steps=30
config=parity
cat >"$work/parity.toml" <<END
[model.shape]
model_type = "qwen3"
vocab_size = 257
hidden_size = 256
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
intermediate_size = 704
max_position_embeddings = 256
tie_word_embeddings = true

[data]
path = "$work/parity-data"

[train]
output_dir = "$work/parity"
steps = $steps
micro_batch_size = 2
global_batch_size = 4
seq_len = 192
lr = 1e-3
min_lr = 1e-3
log_every = 1

[checkpoint]
every = 0
export = false
END
if attempt parity-data 60 "$worker" prepare --bytes --out "$work/parity-data" "$text" >/dev/null; then
    # compare WHAT NAME BAR STEPS
    compare() {
        part "compare-$2" 20 "$check" compare "$1" "$work/$2/metrics.jsonl" "$work/cpu/metrics.jsonl" --bar "$3" --steps "$4"
    }
    training cpu 120 train.device=cpu
    training f32 90 "train.device=$device" train.param_dtype=f32 "${keys[@]}" &&
        compare "losses over $steps steps in f32, beside the CPU's" f32 1e-4 "$steps"
    if [ "$device" = cuda ]; then
        training bf16 90 train.device=cuda train.param_dtype=bf16 "${keys[@]}" &&
            compare "losses over $steps steps in bf16, beside the CPU's in f32" bf16 2e-2 "$steps"
        training bf16-reduce 90 train.device=cuda train.param_dtype=bf16 train.reduce_dtype=bf16 "${keys[@]}" &&
            compare "the same with gradients in bf16" bf16-reduce 3e-2 "$steps"
    else
        row "losses in bf16" "the CPU computes in f32" - SKIPPED
    fi

    ### Begun on the GPU, gone on with on the CPU, ended on the GPU, beside one that was never interrupted.
    third=$((steps / 5))
    training turns 60 "train.device=$device" train.param_dtype=f32 "train.steps=$third" "${keys[@]}" &&
        training turns 60 train.device=cpu "train.steps=$((2 * third))" &&
        training turns 60 "train.device=$device" train.param_dtype=f32 "train.steps=$((3 * third))" "${keys[@]}" &&
        compare "checkpoints: $third steps on the GPU, $third on the CPU, $third on the GPU" turns 1e-4 $((3 * third))
else
    row "data for the trainings" "$(why parity-data)" - FAILED
fi

### The speed of a real shape.

config=speed
if [ "$device" = cuda ]; then
    vocab=151936 shape="hidden_size = 1024
num_hidden_layers = 28
num_attention_heads = 16
num_key_value_heads = 8
head_dim = 128
intermediate_size = 3072" seq=4096 batch=8 count=1000000 steps=24 dtype=bf16
else
    vocab=2000 shape="hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 192" seq=64 batch=4 count=20000 steps=12 dtype=f32
fi
cat >"$work/speed.toml" <<END
[model.shape]
model_type = "qwen3"
vocab_size = $vocab
$shape
max_position_embeddings = 40960
rope_theta = 1000000.0
rms_norm_eps = 1e-6
tie_word_embeddings = true

[data]
path = "$work/speed-data"

[train]
output_dir = "$work/speed"
steps = 100000
micro_batch_size = $batch
global_batch_size = $batch
seq_len = $seq
lr = 1e-4
warmup_steps = 4
log_every = 1

[checkpoint]
every = 0
export = false
END
if tokens speed-data "$vocab" "$count"; then
    # Ended when it has told enough: its checkpoint would be 7 GB.
    attempt speed 100 bash -c '
        trap '\''kill -9 "$!" 2>/dev/null'\'' EXIT
        "${@:3}" &
        until [ "$(grep -c "\"event\":\"step\"" "$1" 2>/dev/null || :)" -ge "$2" ] 2>/dev/null; do
            kill -0 "$!" 2>/dev/null || { wait "$!"; exit; }
            sleep 0.2
        done' speed "$work/speed/metrics.jsonl" "$steps" \
        "$worker" "$work/speed.toml" "train.device=$device" "train.param_dtype=$dtype" "${keys[@]}" \
        >"$work/logs/speed.out" || row "the training of speed" "$(why speed)" - FAILED
    torch=()
    if "$python" -c 'import sys, torch; sys.exit(not (torch.cuda.is_available() or sys.argv[1] == "cpu"))' "$device" \
        2>"$work/logs/import.log"; then
        if attempt pytorch 100 "$python" "$here/examples/gpu_check/step.py" "$device" "$vocab" "$shape" "$seq" "$batch" \
            >"$work/torch.json"; then
            torch=(--torch "$work/torch.json")
        else
            row "speed beside PyTorch's" "$(why pytorch)" - FAILED
        fi
    else
        reason=$(why import)
        [ -s "$work/logs/import.log" ] || reason="its torch sees no GPU"
        row "speed beside PyTorch's" "$python: $reason" - SKIPPED
    fi
    part speed-rows 20 "$check" speed "$work/speed.toml" "$work/speed/metrics.jsonl" "$gpu" "${torch[@]}"
fi

row "the whole check" "$SECONDS s" "$limit s" "$([ "$SECONDS" -le "$((limit + 10))" ] && echo ok || echo FAILED)"
"$check" table "$rows" >"$work/table"
code=$?
cat "$work/table"
if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT" && cp "$work/table" "$OUT/gpu-check.md" && cp -r "$work/logs" "$OUT/" || code=1
    for name in cpu f32 bf16 bf16-reduce turns speed; do
        [ ! -e "$work/$name/metrics.jsonl" ] || cp "$work/$name/metrics.jsonl" "$OUT/logs/$name.jsonl"
    done
fi
exit "$code"
