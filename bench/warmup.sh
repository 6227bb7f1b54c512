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
. bench/common.sh
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

printf '%-34s %10s %18s %10s\n' "2 nodes, 4 ranks" "median ms" "25-75 % ms" "ratio"
ratio 34 'one srun with a warm-up' one one
ratio 34 'one srun with a warm-up, again' one-again one
ratio 34 'two sruns, the first to warm up' two one
ratio 34 'one srun without a warm-up' plain one
