# Everything works on a machine that has only Python (3.11 or newer): each target makes the virtual environment first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check bench mutations clean

demo: $(INSTALLED)            ## train a small language model on real text, without and with the store
	$(BIN)/tierstore demo

test: $(INSTALLED)            ## the test suite
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

check: $(INSTALLED)           ## style, types, directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)           ## every question of bench/: tables, all goals in one table, plots (some twenty minutes)
	$(BIN)/python -m bench

mutations: $(INSTALLED)       ## break every rule that keeps gradients right, once; which test notices? (minutes)
	$(BIN)/python -m tests.mutations

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
