#!/usr/bin/env bash
# Instructions that each hook costs, counted by valgrind's callgrind in the fake
# host of tests/host: without the flag and with it, for the first call in a
# process (what a job pays) and for a repeated one.
#
#   bench/hooks.sh [LIBRARY]      (default: the release library, built first)
#
# Exit code 77: valgrind, gcc or slurm/spank.h is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
    echo "hooks: skipped: $*" >&2
    exit 77
}

for program in valgrind callgrind_annotate gcc; do
    command -v "$program" >/dev/null || skip "no $program"
done
[ -e /usr/include/slurm/spank.h ] || skip "no slurm/spank.h (Debian: libslurm-dev)"
library=${1:-}
if [ -z "$library" ]; then
    cargo build --release --lib --quiet
    library=${CARGO_TARGET_DIR:-target}/release/libpalingenesis.so
fi

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
gcc -std=gnu11 -O1 -g -rdynamic -o "$work/host" tests/host/fake_host.c -ldl

readonly MANY=101

# count CONTEXT unused|flag ROUNDS: "HOOK INSTRUCTIONS" of all its calls.
count() {
    local out=$work/$1.$2.$3
    FAKE_HOST_NO_COUNT=1 valgrind --quiet --tool=callgrind --callgrind-out-file="$out" \
        "$work/host" "$library" bench "$1" "$2" "$3" 2>"$work/log" >&2 || {
        cat "$work/log" >&2
        exit 1
    }
    callgrind_annotate --inclusive=yes --threshold=100 "$out" |
        sed -n 's/^ *\([0-9,]*\) .*:slurm_spank_\([a-z_]*\) .*/\2 \1/p' | tr -d , | sort -u
}

printf '%-10s %-18s %10s %10s %12s %12s\n' '' '' 'without' 'the flag' 'with' 'the flag'
printf '%-10s %-18s %10s %10s %12s %12s\n' CONTEXT HOOK first repeated first repeated
for context in local allocator remote; do
    for flag in unused flag; do
        count "$context" "$flag" 1 >"$work/$flag.1"
        count "$context" "$flag" "$MANY" >"$work/$flag.many"
    done
    for hook in init init_post_opt local_user_init user_init task_init task_exit exit; do
        cells=()
        for flag in unused flag; do
            first=$(awk -v hook="$hook" '$1 == hook { print $2 }' "$work/$flag.1")
            many=$(awk -v hook="$hook" '$1 == hook { print $2 }' "$work/$flag.many")
            [ -n "$first" ] || continue 2
            cells+=("$first" $(((${many:-0} - first) / (MANY - 1))))
        done
        printf '%-10s %-18s %10d %10d %12d %12d\n' "$context" "$hook" "${cells[@]}"
    done
done
echo
echo "srun is 'local', sbatch and salloc are 'allocator', slurmstepd and its tasks are 'remote'. Children that a"
echo "hook forks to look names up are not counted. A repeated task_init finds what the first one set."
