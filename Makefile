# Two commands for everybody: make demo, make test.
.PHONY: all demo test soak matrix bench docs

all:
	cargo build --release --workspace

# A Slurm cluster on this machine and four PyTorch ranks on it.
demo:
	demo/run

# Every test once.
test:
	scripts/test

# What chance decides, many times; takes an hour or more.
soak:
	PALINGENESIS_SOAK=$${PALINGENESIS_SOAK:-20} scripts/test

# The tests that start a cluster on every Slurm release that can be had here, and the
# fake host of the others; prints a table.
matrix:
	scripts/matrix

# Prints ratios; asserts nothing about time. One that cannot be had here (exit
# code 77) says so and does not stop the next.
bench:
	cargo bench --bench hostlist --bench plan --bench preflight --bench topology
	bench/hooks.sh || [ $$? -eq 77 ]
	bench/srun.sh || [ $$? -eq 77 ]
	bench/warmup.sh || [ $$? -eq 77 ]
	bench/preflight.sh || [ $$? -eq 77 ]
	cargo bench -p palingenesis-worker --bench checkpoint
	bench/collectives.sh || [ $$? -eq 77 ]

# Writes docs/variables.md from the catalog, and what docs/preflight.md shows from a
# cluster on which it happens (as root); tests fail when they are stale.
docs:
	UPDATE_DOCS=1 cargo test --test catalog the_page_of_variables_is_up_to_date
	UPDATE_DOCS=1 cargo test --test preflight

-include packaging/install.mk
