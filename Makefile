# `make train` and `make test` do everything on a machine that has Python 3.11 or later and no more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?= --ctx 64
EXTRAS := test,trainers,plot,triton
# kernels are written in Triton, which takes a gigabyte, and which a CPU needs only to test them
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
PROGRAM := .$(if $(GPU),[triton])
# setuptools warns of folders that have the name of a package
PIP = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet
# half of the time that tests take
KERNEL_TESTS := tests/test_planted_faults.py tests/kernels tests/model tests/generation tests/interop \
	tests/nn tests/inspect
# what is slow and rarely tells what the others do not
TESTS := -m "not slow"
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider $(TESTS)

# what is imported is compiled once, and not by each process
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-kernels test-rest test-portable lint bench figures lock clean

train: $(VENV)/installed
	$(BIN)/arb train $(ARGS)

# two processes of one thread each: the interpreted kernels use one core, whatever there is
test: $(VENV)/with-tests lint
	$(MAKE) --no-print-directory -j2 test-kernels test-rest

test-all: $(VENV)/with-tests lint
	$(MAKE) --no-print-directory -j2 TESTS= test-kernels test-rest

test-kernels: $(VENV)/with-tests
	$(PYTEST) $(KERNEL_TESTS)

test-rest: $(VENV)/with-tests
	$(PYTEST) tests $(addprefix --ignore=,$(KERNEL_TESTS))

# a selection of tests, as CPUs with fewer instructions run them
test-portable: $(VENV)/with-tests
	OMP_NUM_THREADS=1 $(BIN)/python tests/portable.py

# measures; `make figures` then writes what it found into the documents
bench: $(VENV)/with-tests
	$(BIN)/python -m benchmarks

figures: $(VENV)/with-tests
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.plots

# for a release: what an installation takes with this Python on this platform, by hashes
lock: $(VENV)/installed
	$(BIN)/python .ci/lock requirements.lock

lint: $(VENV)/with-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml | $(BIN)/pip
	$(PIP) --editable '$(PROGRAM)'
	touch $@

# the pip of Python 3.11 takes three times as long to choose packages
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --upgrade pip

# at once, and not after the program alone: pip looks through every release of each package again;
# modules are compiled when they are first imported, which few of them ever are
$(VENV)/with-tests: pyproject.toml | $(BIN)/pip
	$(PIP) --no-compile --editable '.[$(EXTRAS)]'
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
