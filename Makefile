# Everything works on a machine that has only Python (3.11 or newer): each target first installs into the virtual
# environment that is active, or into .venv, which it makes if need be. A PyTorch that is there stays.
PYTHON ?= python3
VENV := $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
CONSTRAINTS := $(VENV)/tierstore-constraints.txt
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)
RUNTIME := $(VENV)/.tierstore
NATIVE := $(VENV)/.tierstore-native
DEV := $(VENV)/.tierstore-dev
# Before anything is made: pip would only say that it finds no numpy. Double quotes, as the shell has it in single ones.
NEW_ENOUGH := import sys; a, b, *_ = sys.version_info; sys.exit(f"Python {a}.{b} is too old: tierstore needs 3.11 or newer. Name one: make PYTHON=python3.11 ..." if (a, b) < (3, 11) else 0)
INSTALLED_TORCH := import importlib.metadata as m; print("torch==" + m.version("torch"))
# One more than there are cores, as tests wait for drives and processes; at most four.
WORKERS = $(shell $(BIN)/python -c "import os; print(min(4, len(os.sched_getaffinity(0)) + 1))")
DOCS := $(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --nitpicky --quiet docs build/docs

MINUTES ?= 10
SEED ?= 1
MODULE ?= tierstore/disk/extents.py
TESTS ?= tests/store/test_extents.py
SAMPLE ?= 40
TORCHES ?= oldest newest
PYTHONS ?= 3.11 3.12 3.13 3.14

# cosmic-ray has no option for it.
define KEEP_A_SAMPLE
import sqlite3
with sqlite3.connect(".mutants/mutants.sqlite") as mutants:
    chosen = "SELECT job_id FROM mutation_specs ORDER BY random() LIMIT $(SAMPLE)"
    mutants.execute(f"DELETE FROM mutation_specs WHERE job_id NOT IN ({chosen})")
    mutants.execute("DELETE FROM work_items WHERE job_id NOT IN (SELECT job_id FROM mutation_specs)")
endef
export KEEP_A_SAMPLE

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all check docs matrix bench bench-tuning gpu mutations mutants fuzz soak release-check clean

help:                   ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(NATIVE)         ## train a small language model with and without the store
	$(BIN)/tierstore demo

test: $(DEV)            ## run the test suite (6 to 15 minutes on two idle cores)
	@echo "The tests take 6 to 15 minutes on two idle cores; make test-all runs the slow ones, too."
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-slow: $(DEV)       ## run the tests that make test leaves out (half an hour)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "slow and not many"

test-all: test test-slow  ## run both

check: $(DEV)           ## check style, types, directions of imports, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(DOCS)

docs: $(DEV)            ## build the documentation: build/docs/index.html
	$(DOCS)

matrix: $(DEV)          ## test TORCHES with PYTHONS (some minutes each, 6 GB)
	$(BIN)/python -m tests.matrix --torches "$(TORCHES)" --pythons "$(PYTHONS)" --write

bench: $(DEV)           ## run all benchmarks: tables, goals, plots (over three hours)
	$(BIN)/python -m bench

bench-tuning: $(DEV)    ## compare settings (over 20 minutes)
	$(BIN)/python -m bench prefetch_tuning tuned_settings

gpu: $(DEV)             ## test and measure this machine's GPU (9 minutes)
	$(BIN)/python -m bench.gpu

mutations: $(DEV)       ## break each rule once: which test notices? (20 minutes)
	$(BIN)/python -m tests.mutations

mutants: $(DEV)         ## change MODULE at SAMPLE random places: do TESTS notice?
	$(PIP) --quiet -e '.[mutants]'
	rm -rf .mutants && git clone --quiet . .mutants
	printf '[cosmic-ray]\nmodule-path = "$(MODULE)"\ntimeout = 120.0\ntest-command = "$(abspath $(BIN))/python -m pytest -q -x $(TESTS)"\n[cosmic-ray.distributor]\nname = "local"\n' > .mutants/mutants.toml
	cd .mutants && $(abspath $(BIN))/cosmic-ray init mutants.toml mutants.sqlite && $(abspath $(BIN))/cosmic-ray baseline mutants.toml
	$(BIN)/python -c "$$KEEP_A_SAMPLE"
	cd .mutants && $(abspath $(BIN))/cosmic-ray exec mutants.toml mutants.sqlite && $(abspath $(BIN))/cr-report --surviving-only --show-diff mutants.sqlite

fuzz: $(DEV)            ## feed malformed input to all parsers, for MINUTES
	$(PIP) --quiet -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

soak: $(DEV)            ## train while daemons die and disks fill, for MINUTES
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

release-check: $(DEV)   ## build the release, install it, try it (minutes, 3 GB)
	$(BIN)/python -m tests.release

clean:                  ## remove .venv and all caches
	rm -rf .venv .matrix .mutants build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(CONSTRAINTS): FORCE
	@if test -x $(BIN)/python; then $(BIN)/python -c '$(NEW_ENOUGH)'; else $(PYTHON) -c '$(NEW_ENOUGH)'; fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@{ grep -v '^torch==' constraints.txt; $(BIN)/python -c '$(INSTALLED_TORCH)' 2>/dev/null || grep '^torch==' constraints.txt; } > $@

FORCE:

$(RUNTIME): pyproject.toml constraints.txt | $(CONSTRAINTS)
	@echo "Setting up $(VENV): tierstore, a few small packages, and PyTorch unless it is there (1 GB and a minute; 5 GB with CUDA)."
	$(PIP) -e .
	@touch $@

$(NATIVE): $(RUNTIME) $(wildcard native/*.*)
	@$(PIP) --quiet ./native 2>$@.log || echo "tierstore-native was not built, which is optional (is there a C compiler? $@.log)."
	@touch $@

$(DEV): $(NATIVE)
	@echo "Adding what the tests and checks need: linters, transformers, lightning, ray and others (another GB, some minutes)."
	$(PIP) -e '.[dev,trainers,docs]'
	@touch $@
