# Two commands for everybody: make demo, make test.
.PHONY: all demo test soak bench tools

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

# Prints ratios; asserts nothing about time.
bench:
	cargo bench --bench hostlist
	bench/hooks.sh
	bench/srun.sh

-include packaging/install.mk
