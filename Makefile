# agentpipe: `make run` needs a Python 3.11 or 3.12 and nothing else.
#
#   make install  set up only: .venv with the pinned set (run, test, ui, lint, fix and bench do this first)
#   make run      set up, run the main job, end with a scoreboard        (ARGS="--profile demo" for the short one)
#   make test     set up, every test                                    (ARGS="-m 'not slow'" for the quick ones)
#   make ui       the Dagster UI of the same home, on 127.0.0.1
#   make lint     formatting, rules, types, import contracts: checks only; `make fix` repairs what can be repaired
#   make bench    measures simulator, training and buffer beside others, writes benchmarks/RESULTS.md (ARGS="--smoke" to try it: writes elsewhere)
#   make clean    removes caches and the virtual environment, keeps the home

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell command -v $(name) 2>/dev/null)))
AGENTPIPE_HOME ?= .agentpipe
ARGS ?=
TEST_WORKERS ?= 3

# uv reads its own variable for a folder of wheels; whoever set pip's meant both.
ifneq ($(strip $(PIP_FIND_LINKS)),)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
export AGENTPIPE_HOME
# Each run is a process of its own; without cached byte code it would compile what it imports, which takes seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install run test ui lint fix bench clean browser postgres triton

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11 or 3.12, or set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	    { echo "$(PYTHON) is not Python 3.11 or 3.12: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "The venv module does not work here (on Debian: apt-get install python3-venv)" >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt Makefile | $(BIN)/python
	@echo "Installing the pinned set into $(VENV) …" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv || \
	    echo "uv cannot be had here, pip takes its place (slower)" >&2
	@if [ -x $(BIN)/uv ]; then \
	    $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'; \
	else \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'; \
	fi
	@touch $(STAMP)

run: install triton
	@$(BIN)/agentpipe run $(ARGS)

ui: install
	@$(BIN)/agentpipe ui $(ARGS)

test: install browser postgres triton
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(TEST_WORKERS) --dist=loadfile --no-loadscope-reorder $(ARGS)

# A bundle is tried in a real server before it becomes champion. Where none can be had, the run says what that means.
triton: install
	@$(BIN)/agentpipe bundle install-triton >/dev/null || \
	    echo "No Triton here: no bundle can be checked in a server (docs/how-to/serving.md says what follows)" >&2

# The browser test wants Debian's chromium. Absent and not to be had, that test skips and says so.
browser:
	@command -v chromium >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && \
	    echo "Installing chromium for the browser test …" >&2 && \
	    { apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 || \
	    { apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; }; } ; } || \
	    echo "No chromium here: the browser test will skip" >&2

# Dagster on a real Postgres is tested with Debian's. Absent and not to be had, those tests skip and say so.
postgres:
	@command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || \
	    { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && \
	    echo "Installing Postgres for the tests of the deployment …" >&2 && \
	    { apt-get install -y -qq --no-install-recommends postgresql >/dev/null 2>&1 || \
	    { apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq --no-install-recommends postgresql >/dev/null 2>&1; }; } ; } || \
	    echo "No Postgres here: the tests of the deployment will skip" >&2

lint: install
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	@$(BIN)/mypy

fix: install
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: install
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
