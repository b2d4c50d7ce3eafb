# Each command is one session of noxfile.py. nox itself lives in .venv/; its sessions live in .nox/.
# Any Python >= 3.11 starts it, if it can make environments. Several names are tried because `python3` may be older.
PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
NOX = .venv/bin/nox
ARGS ?=
N ?= 1000
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help demo ui quick test matrix nightly lint docs fuzz mutants bench soak dist clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(NOX)  ## a small training run, logged with lox
	@$(NOX) -s demo -- $(ARGS)

ui: $(NOX)  ## after `make demo`: its curves in a browser (ARGS="--port 8080 --no-browser")
	@$(NOX) -s ui -- $(ARGS)

quick: $(NOX)  ## between two edits: the fast tests, on the source tree, in less than a minute (ARGS="-k scan")
	@$(NOX) -s quick -- $(ARGS)

test: $(NOX)  ## before a push: lint, types and tests on the newest JAX (ARGS="-k scan")
	@$(NOX) -s lint types tests -- $(ARGS)

matrix: $(NOX)  ## the rest of CI: other JAX and Python releases, and the documentation
	@$(NOX) -t matrix -- $(ARGS)

nightly: $(NOX)  ## all tests: whole tables, and thousands of random programs
	@$(NOX) -s nightly -- $(ARGS)

lint: $(NOX)  ## style and types alone
	@$(NOX) -s lint types

docs: $(NOX)  ## the documentation, in docs/_build (ARGS="-b linkcheck" looks for dead links)
	@$(NOX) -s docs -- $(ARGS)

fuzz: $(NOX)  ## random programs against plain Python (N=1000 SEED=0)
	@LOX_FUZZ_N=$(N) LOX_FUZZ_SEED=$(SEED) $(NOX) -s fuzz -- $(ARGS)

mutants: $(NOX)  ## plant small faults in lox, and see whether the tests find them (ARGS="--number 60 --seed 0")
	@$(NOX) -s mutants -- $(ARGS)

bench: $(NOX)  ## ratios to hand-written code; other ways of logging beside it (ARGS="peers peers-right")
	@$(NOX) -s bench -- $(ARGS)

soak: $(NOX)  ## three minutes of a long training: memory, objects and threads must not grow (ARGS="--minutes 20")
	@$(NOX) -s soak -- $(ARGS)

dist: $(NOX)  ## the release: build it, and run the README with the wheel in an empty environment
	@$(NOX) -s dist

clean:  ## remove environments, caches and build outputs
	rm -rf .venv .nox dist build docs/_build .pytest_cache .ruff_cache

$(NOX):
	@echo "$(or $(PYTHON),$(error no Python >= 3.11 with the venv module on PATH: install one, or pass PYTHON=...)) installs nox in .venv/"
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install --quiet --disable-pip-version-check "nox>=2026.10.20"
