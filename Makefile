# Everything works on a machine that has only Python (3.11 or newer): each target makes the virtual environment first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

MINUTES ?= 10
SEED ?= 1
TORCHES ?= oldest newest
PYTHONS ?= 3.11 3.12 3.13 3.14

.PHONY: demo test check matrix bench bench-tuning gpu mutations fuzz soak clean

demo: $(INSTALLED)            ## train a small language model on real text, without and with the store
	$(BIN)/tierstore demo

test: $(INSTALLED)            ## the test suite
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

check: $(INSTALLED)           ## style, types, directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

matrix: $(INSTALLED)          ## a bounded suite on the oldest and the newest torch, with each Python found (some minutes a row, 15 GB)
	$(BIN)/python -m tests.matrix --torches "$(TORCHES)" --pythons "$(PYTHONS)" --write

bench: $(INSTALLED)           ## every question of bench/: tables, all goals in one table, plots (some 15 minutes)
	$(BIN)/python -m bench

bench-tuning: $(INSTALLED)    ## which settings are best, and what the simulator says of them (some 15 minutes more)
	$(BIN)/python -m bench shared_pages simulator_accuracy io_depth prefetch_tuning tuned_settings

gpu: $(INSTALLED)             ## prove and measure the accelerator path on this machine's GPU (under nine minutes)
	$(BIN)/python -m bench.gpu

mutations: $(INSTALLED)       ## break every rule that keeps gradients right, once; which test notices? (half an hour or more)
	$(BIN)/python -m tests.mutations

fuzz: $(INSTALLED)            ## feed all parsers what no sound peer, file or user would, for MINUTES in all
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

soak: $(INSTALLED)            ## train for MINUTES while daemons are killed, disks fill up and errors are thrown
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

clean:
	rm -rf .venv .matrix build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,trainers]'
	touch $@
