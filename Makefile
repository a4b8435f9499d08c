# Every target sets up .venv first. A second run installs nothing, until pyproject.toml changes.
#
#     make run ARGS="--epochs 3"       passes options on (run, test, test-all and bench)
#     make test PYTHON=python3.12      chooses the Python that .venv is made of
#     make test-versions SESSIONS="tests(torch='2.11')"

PYTHON ?= python3.12 python3.11 python3.13 python3
ARGS ?=

# mpirun too is taken from there first, so that mpi4py meets the MPI that it was installed with.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

PIP := .venv/bin/python -m pip --disable-pip-version-check install
# Debian has Pythons without ensurepip, which cannot make an environment.
NEW_ENOUGH := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))

.DELETE_ON_ERROR:
.PHONY: help run learn diff tutorial-samples test test-all test-versions bench docs lint dist format clean

help: ## print this list (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

run: .venv/run ## train on the shipped digits, 2 ranks on MPI, and print the test accuracy
	.venv/bin/python run.py --backend mpi --nproc 2 $(ARGS)

learn: .venv/learn ## list the tutorial's chapters, and which of your exercises pass
	.venv/bin/python -m tutorial

diff: .venv/learn ## show how the programs of two chapters differ: ARGS="06 07"
	.venv/bin/python -m tutorial diff $(ARGS)

tutorial-samples: .venv/learn ## run the tutorial's programs; put what they print and draw into its pages
	.venv/bin/python -m tutorial.samples $(ARGS)

test: .venv/test ## run the tests of every module, in some minutes
	.venv/bin/python -m pytest $(ARGS)

test-all: .venv/test ## run all tests: torch's own, random programs, two hosts and more cases
	.venv/bin/python -m pytest -m "" $(ARGS)

test-versions: .venv/versions ## run `make test` on each torch, Python and MPI promised; 6 GB each
	.venv/bin/nox $(if $(SESSIONS),-s "$(SESSIONS)") -- $(ARGS)

bench: .venv/bench ## measure beside torch's DDP; ARGS=--quick is rough
	.venv/bin/python -m benchmarks $(ARGS)

docs: .venv/docs ## build the site into build/site
	rm -rf build/pages build/site
	.venv/bin/python tools/site_pages.py build/pages
	PYTHONPATH=tools .venv/bin/python -m sphinx -qWa -c tools/site build/pages build/site -d build/doctrees
	@echo "build/site/index.html"

lint: .venv/lint ## check style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

dist: .venv/dist ## build the package into dist, and check it
	rm -rf dist *.egg-info
	.venv/bin/python -m build --no-isolation
	.venv/bin/twine check --strict dist/*
	.venv/bin/check-wheel-contents dist/*.whl

format: .venv/lint ## rewrite the code in the project's style
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

clean: ## remove caches and build outputs; .venv, data/ and runs/ stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# .venv/test, for one, says that the group "test" of pyproject.toml is installed.
.venv/%: pyproject.toml
	@.venv/bin/python -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	    for python in $(PYTHON); do \
	        "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null || continue; \
	        echo "$$python -m venv --clear .venv"; \
	        exec "$$python" -m venv --clear .venv; \
	    done; \
	    echo "make: needs Python 3.11 or later with venv; found none among: $(PYTHON)" >&2; \
	    exit 1; \
	}
	$(PIP) --quiet "pip>=25.1" # knows --group
	$(PIP) --no-compile --editable . --group $*
	@touch $@
