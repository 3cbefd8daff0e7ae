# `make train` and `make test` are the two commands; each sets up all that it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt

.PHONY: train test test-all test-megatron bench-megatron lint bench docs-tables clean

train: $(VENV)/.train
	$(BIN)/muonloom train configs/default.toml

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow or not slow"

test-megatron: $(VENV)/.megatron
	$(BIN)/python -m pytest tests/megatron

bench-megatron: $(VENV)/.megatron
	PYTHONPATH=tests $(BIN)/python -m megatron.compare_step

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/muonloom bench

# torch first, from the constraints, so that the rest never pulls another build of it in.
$(VENV)/.torch: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	touch $@

$(VENV)/.train: $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e ".[train]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.train

$(VENV)/.bench: $(VENV)/.train
	$(PIP) install -q -c constraints.txt -e ".[bench]"
	# It asks for Python 3.12 and runs on 3.11 too. Where it cannot be had, its rows say "not installed".
	$(PIP) install -q --no-deps --ignore-requires-python emerging-optimizers==0.3.0 || true
	touch $@

# Asks for Python 3.12, runs on 3.11 too; comes last, as the tests look for it. Triton stays as torch brought
# it, where torch did. Where something cannot be had, pip says why, and the tests are skipped.
$(VENV)/.megatron: $(VENV)/.dev
	$(PIP) install -q -c constraints.txt absl-py psutil \
	&& ($(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install -q --no-deps triton==3.9.0) \
	&& $(PIP) install -q --no-deps --ignore-requires-python \
		megatron-core==0.19.2 emerging-optimizers==0.3.0 \
	&& touch $@ || echo "Megatron-Core could not be installed: its tests are skipped."

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
