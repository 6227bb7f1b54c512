#!/usr/bin/env bash
# What the pre-flight adds to a launch: srun on four nodes, each with a network of
# its own, with the pre-flight and without it, taking turns so that a change of the
# machine's load meets both.
#
#   bench/preflight.sh [ROUNDS]          (default 25)
#
# "off, again" is the machine's noise: a difference smaller than that one's is none.
# Exit code 77: no cluster is possible here.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-25}
. bench/common.sh
cp -- "$library" "$work/spank_palingenesis.so"
SLURM_SANDBOX_BIND=$work "$sandbox" up --dir "$dir" --nodes 4 --namespace-per-node \
    --plugstack "optional $work/spank_palingenesis.so" >/dev/null

# one SAMPLE SPEC: microseconds of one srun, measured inside the cluster.
one() {
    local took
    took=$("$sandbox" run --dir "$dir" -- timeout -k 3 60 bash -c '
        start=${EPOCHREALTIME/[.,]/}
        srun -Q -K -N4 -n4 "--palingenesis=$1" /bin/true || exit
        echo $((${EPOCHREALTIME/[.,]/} - start))' bash "$2") || {
        echo "preflight: a run failed ($1)" >&2
        exit 1
    }
    echo "$took" >>"$work/$1"
    # A node that is still completing would be waited for.
    "$sandbox" run --dir "$dir" -- bash -c 'while [ -n "$(squeue -h)" ]; do sleep 0.01; done'
}

round() {
    one off preflight=off
    one on preflight=on
    one again preflight=off
    one on-again preflight=on
}

round # the first of each warms caches up
rm -f "$work"/{off,on,again,on-again}
for ((run = 0; run < rounds; run++)); do
    round
done

# row LABEL SAMPLE: its median and middle half, and what it is above the first row's median.
row() {
    awk -v label="$1" -v m="$(percentile "$work/$2" 50)" -v l="$(percentile "$work/$2" 25)" \
        -v h="$(percentile "$work/$2" 75)" -v b="$(percentile "$work/off" 50)" \
        'BEGIN { printf "%-26s %10.1f %9.1f - %6.1f %+10.1f\n", label, m / 1000, l / 1000, h / 1000, (m - b) / 1000 }'
}

printf '%-26s %10s %18s %10s\n' "srun -K -N4 -n4 /bin/true" "median ms" "25-75 % ms" "added ms"
row 'preflight=off' off
row 'preflight=off, again' again
row 'preflight=on' on
row 'preflight=on, again' on-again

# added LABEL SAMPLE SAMPLE: the median of what the second one took longer than the
# first one, which ran just before it: what the machine's load does slowly cancels out.
added() {
    paste "$work/$2" "$work/$3" | awk '{ print $2 - $1 }' >"$work/differences"
    awk -v label="$1" -v m="$(percentile "$work/differences" 50)" -v l="$(percentile "$work/differences" 25)" \
        -v h="$(percentile "$work/differences" 75)" \
        'BEGIN { printf "%-26s %10.1f %9.1f - %6.1f\n", label, m / 1000, l / 1000, h / 1000 }'
}
printf '\n%-26s %10s %18s\n' 'each run and the next' 'median ms' '25-75 % ms'
added 'off, then on' off on
added 'off, then on, again' again on-again
added 'on, then off' on again
