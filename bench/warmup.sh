#!/usr/bin/env bash
# One srun with a warm-up against the two that people write, one to fill the caches
# and one to train, on a real Slurm in namespaces of this machine. They take turns,
# so that a change of the machine's load meets all of them.
#
#   bench/warmup.sh [RUNS]          (default 25 of each)
#
# The warm-up is one that finds all caches filled, as every start but the first does.
# The machine's noise is in the table: the middle half of the runs (25 to 75 %) and the
# ratio of two samples of the same. Exit code 77: no cluster is possible here.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-25}
sandbox=tests/sandbox/slurm-sandbox
cargo build --release --lib --quiet
library=$(realpath "${CARGO_TARGET_DIR:-target}/release/libpalingenesis.so")
work=$(mktemp -d)
chmod 711 "$work" # the cluster's user must get through
dir=$work/cluster
trap '"$sandbox" down --dir "$dir" >/dev/null 2>&1 || true; rm -rf -- "$work"' EXIT
"$sandbox" up --dir "$dir" --nodes 2 --cores 4 --plugstack "optional $library" >/dev/null

# one SAMPLE COMMANDS: microseconds of them inside one allocation, as in a batch script.
one() {
    local took
    took=$("$sandbox" run --dir "$dir" -- timeout -k 3 60 salloc -Q -N2 --ntasks-per-node=2 bash -c '
        cd ~
        start=${EPOCHREALTIME/[.,]/}
        eval "$1" || exit
        echo $((${EPOCHREALTIME/[.,]/} - start))' bash "$2") || {
        echo "warmup: a run failed ($1)" >&2
        exit 1
    }
    echo "$took" >>"$work/$1"
}

two='srun -N1 -n1 /bin/true && srun -K --palingenesis /bin/true'
round() {
    one one 'srun -K --palingenesis --palingenesis-warm=/bin/true /bin/true'
    one two "$two"
    one one-again 'srun -K --palingenesis --palingenesis-warm=/bin/true /bin/true'
    one plain 'srun -K --palingenesis /bin/true'
}

round # the first of each warms caches up
rm -f "$work"/one "$work"/one-again "$work"/two "$work"/plain
for ((run = 0; run < runs; run++)); do
    round
done

# percentile FILE P
percentile() { sort -n "$1" | awk -v p="$2" '{ v[NR] = $1 } END { i = int((NR - 1) * p / 100 + 0.5) + 1; print v[i] }'; }

base=$(percentile "$work/one" 50)
printf '%-34s %10s %18s %10s\n' "2 nodes, 4 ranks" "median ms" "25-75 % ms" "ratio"
for sample in one one-again two plain; do
    case $sample in
    one) label='one srun with a warm-up' ;;
    one-again) label='one srun with a warm-up, again' ;;
    two) label='two sruns, the first to warm up' ;;
    plain) label='one srun without a warm-up' ;;
    esac
    awk -v label="$label" -v m="$(percentile "$work/$sample" 50)" -v l="$(percentile "$work/$sample" 25)" \
        -v h="$(percentile "$work/$sample" 75)" -v b="$base" \
        'BEGIN { printf "%-34s %10.1f %9.1f - %6.1f %10.3f\n", label, m / 1000, l / 1000, h / 1000, m / b }'
done
