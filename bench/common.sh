# What the benches of whole launches share; sourced from the repository's root after
# `set -euo pipefail`. Sets sandbox, library, work and dir; the cluster in dir is taken
# down, and work removed, when the script ends.

sandbox=tests/sandbox/slurm-sandbox
cargo build --release --lib --quiet
library=$(realpath "${CARGO_TARGET_DIR:-target}/release/libpalingenesis.so")
work=$(mktemp -d)
chmod 711 "$work" # the cluster's user must get through
dir=$work/cluster
trap '"$sandbox" down --dir "$dir" >/dev/null 2>&1 || true; rm -rf -- "$work"' EXIT

# percentile FILE P
percentile() { sort -n "$1" | awk -v p="$2" '{ v[NR] = $1 } END { i = int((NR - 1) * p / 100 + 0.5) + 1; print v[i] }'; }

# ratio WIDTH LABEL SAMPLE BASE: the sample's median and middle half in ms, and the
# median as a ratio to the sample BASE's.
ratio() {
    awk -v width="$1" -v label="$2" -v m="$(percentile "$work/$3" 50)" -v l="$(percentile "$work/$3" 25)" \
        -v h="$(percentile "$work/$3" 75)" -v b="$(percentile "$work/$4" 50)" \
        'BEGIN { printf "%-*s %10.1f %9.1f - %6.1f %10.3f\n", width, label, m / 1000, l / 1000, h / 1000, m / b }'
}
