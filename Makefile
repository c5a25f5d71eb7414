# `make train` and `make test` do everything on a machine that has Python 3.11 or later and no more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?= --ctx 64

.PHONY: train test lint bench clean

train: $(VENV)/installed
	$(BIN)/arb train $(ARGS)

test: $(VENV)/installed lint
	$(BIN)/python -m pytest -q

bench: $(VENV)/installed
	CUBLAS_WORKSPACE_CONFIG=:4096:8 $(BIN)/python -m benchmarks

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,plot]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
