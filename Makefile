# Everything runs in virtual environments under .venv/, which tools/envs.py creates when they are
# missing or pyproject.toml has changed. Nothing needs to be installed or activated beforehand.

# Any Python >= 3.11 will do to start; several names are tried because `python3` may be older.
PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ENVS = $(or $(PYTHON),$(error no Python >= 3.11 on PATH: install one, or pass PYTHON=...)) \
  tools/envs.py

MATRIX ?= oldest middle newest smoke
N ?= 1000
SEED ?= 0
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo ui quick test lint docs fuzz bench soak dist clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo:  ## a small training run, logged with lox
	@$(ENVS) demo $(ARGS)

ui:  ## the curves of the demo in a browser (ARGS="--port 8080 --no-browser")
	@$(ENVS) ui $(ARGS)

quick:  ## the fast tests on the newest JAX, of the source as it is: between two edits (ARGS="-k scan")
	@$(ENVS) quick $(ARGS)

test:  ## lint, types and tests on the oldest, middle and newest JAX, a few on the others (MATRIX=newest, MATRIX=all, ARGS="-k foo")
	@$(ENVS) test "$(MATRIX)" $(ARGS)

lint:  ## ruff and pyright only
	@$(ENVS) lint

docs:  ## build the documentation (ARGS="-b linkcheck" looks for dead links, also to other sites)
	@$(ENVS) docs $(ARGS)

fuzz:  ## random programs against plain Python (N=1000, SEED=0)
	@LOX_FUZZ_N=$(N) LOX_FUZZ_SEED=$(SEED) $(ENVS) run -m pytest -n 2 tests/test_fuzz.py $(ARGS)

bench:  ## run time and compile time as ratios to hand-written code; other ways of logging beside it (ARGS="peers peers-right")
	@$(ENVS) bench $(ARGS)

soak:  ## a long training in three minutes: does memory, or anything else, grow? (ARGS="--minutes 20", ARGS="tap wandb")
	@$(ENVS) run benchmarks/soak.py $(ARGS)

dist:  ## the release: build it, install the wheel in an empty environment, run the quick start
	@$(ENVS) dist

clean:  ## remove the environments, caches and build outputs
	rm -rf .venv dist build docs/_build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
