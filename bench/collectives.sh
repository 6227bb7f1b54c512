#!/usr/bin/env bash
# The worker's collectives against torch's gloo on this machine: all_reduce, all_gather and
# reduce_scatter between 2 and 4 processes, ours over Unix sockets, as on one host, and over
# TCP, as between hosts, in turns with gloo, so that a change of the machine's load meets all.
#
#   bench/collectives.sh [ROUNDS]        (default 3)
#
# A ratio is gloo's time divided by ours: above 1 we are faster. Exit code 77: no torch here.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-3}
export SIZES="65536 1048576 16777216 67108864"
python=${PYTHON:-/usr/bin/python3}
"$python" -c 'import torch' 2>/dev/null || {
    echo "collectives: skipped: $python has no torch" >&2
    exit 77
}
ours=${COLLECTIVES:-$(cargo bench -p palingenesis-worker --bench collectives --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"name":"collectives".*"executable":"\([^"]*\)".*/\1/p')}
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
PALINGENESIS_STORE_KEY=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export PALINGENESIS_STORE_KEY

# ranks WORLD SAMPLE COMMAND...: all ranks of one group, below a deadline; PORT is replaced.
ranks() {
    local world=$1 sample=$2 port pids=() rank pid
    shift 2
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    for ((rank = 0; rank < world; rank++)); do
        timeout -k 3 300 "$1" ${GLOO:+bench/collectives.py} "$rank" "$world" "$port" "${@:2}" >>"$work/$sample-$world" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid"
    done
}

for ((round = 0; round < rounds; round++)); do
    for world in 2 4; do
        ranks "$world" unix "$ours" unix
        GLOO=1 ranks "$world" gloo "$python"
        ranks "$world" tcp "$ours" tcp
    done
done

# The best of the rounds: what else runs on the machine only adds.
printf '%-15s %5s %9s %12s %12s %12s %10s %10s\n' operation ranks KiB 'gloo ms' 'one host ms' 'TCP ms' 'gloo/host' 'gloo/TCP'
for world in 2 4; do
    awk -v world="$world" '
        { key = $1 " " $2; file = FILENAME; sub(/.*\//, "", file); sub(/-.*/, "", file)
          if (!((file, key) in best) || $3 < best[file, key]) best[file, key] = $3
          if (!(key in seen)) { seen[key] = 1; order[++count] = key } }
        END { for (i = 1; i <= count; i++) { key = order[i]; split(key, part, " ")
              g = best["gloo", key] / 1e6; u = best["unix", key] / 1e6; t = best["tcp", key] / 1e6
              printf "%-15s %5d %9d %12.3f %12.3f %12.3f %10.2f %10.2f\n", part[1], world, part[2] / 1024, g, u, t, g / u, g / t } }
    ' "$work"/{gloo,unix,tcp}-"$world"
done
