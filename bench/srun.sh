#!/usr/bin/env bash
# What the plugin costs an srun on a real Slurm, in namespaces of this machine:
# absent, installed without the flag, and with the flag. The three take turns, so
# that a change of the machine's load meets all of them.
#
#   bench/srun.sh [RUNS]          (default 25 of each)
#
# The machine's noise is in the table: the middle half of the runs (25 to 75 %)
# and the ratio of two samples without the plugin. A difference smaller than
# that is none. Exit code 77: no cluster is possible here.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-25}
. bench/common.sh
"$sandbox" up --dir "$dir" --nodes 2 >/dev/null

# one SAMPLE [FLAG]: microseconds of one srun, measured inside the cluster.
one() {
    local took
    took=$("$sandbox" run --dir "$dir" -- timeout -k 3 60 bash -c '
        start=${EPOCHREALTIME/[.,]/}
        srun -K -N2 -n4 "$@" /bin/true || exit
        echo $((${EPOCHREALTIME/[.,]/} - start))' bash "${@:2}") || {
        echo "srun: a run failed ($1)" >&2
        exit 1
    }
    echo "$took" >>"$work/$1"
}

round() {
    "$sandbox" plugstack --dir "$dir"
    one absent
    one absent-again
    "$sandbox" plugstack --dir "$dir" "optional $library"
    one installed
    one flag --palingenesis
}

round # the first of each warms caches up
rm -f "$work"/absent "$work"/absent-again "$work"/installed "$work"/flag
for ((run = 0; run < runs; run++)); do
    round
done

printf '%-26s %10s %18s %10s\n' "srun -K -N2 -n4 /bin/true" "median ms" "25-75 % ms" "ratio"
ratio 26 'plugin absent' absent absent
ratio 26 'plugin absent, again' absent-again absent
ratio 26 'installed, without flag' installed absent
ratio 26 'with --palingenesis' flag absent
