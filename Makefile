# make demo | test | test-all | bench | readme: each sets up what it needs on a fresh machine (CPU is enough).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# A CPU wheel index for machines whose default index serves the CUDA build: make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
BIN := $(VENV)/bin

.PHONY: setup demo test test-all bench readme lint clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[dev,hf]"
	touch $@

setup: $(VENV)/.ready

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

test-all: lint
	$(BIN)/python -m pytest -m ""

demo: setup
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

# DATA: a folder with runs/*.jsonl and kernels/*.csv.gz of measured data (tests/bench/run.sh); none is part of this repository.
bench: setup
	PATH="$(abspath $(BIN)):$$PATH" bash tests/bench/run.sh $(DATA)

readme: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.readme

clean:
	rm -rf $(VENV) build dist *.egg-info out
