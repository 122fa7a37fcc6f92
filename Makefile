# Everything a person or CI does here. Each target sets up .venv first, once per change of pyproject.toml or
# constraints.txt. `make help` lists the targets.

# The first of these that starts; override with `make PYTHON=/path/to/python3.12 ...`.
PYTHON ?= $(shell for p in python3.11 python3; do "$$p" -c "" 2>/dev/null && { echo "$$p"; break; }; done)
CONFIG ?= conf/hand_reach_dense.yaml
ARGS ?=
PYTEST_ARGS ?=
# So many files of tests run side by side; 0: one after the other, in one process.
TEST_PROCESSES ?= 2

VENV := .venv
BIN := $(VENV)/bin
# constraints.txt applies to every install: an unpinned torch could otherwise bring another build of it.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
SETUP := $(VENV)/.stamp-dev
SETUP_COMPARE := $(VENV)/.stamp-compare
SCRIPTS := $(wildcard scripts/*.py)

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format wheel compare benchmark-smoke clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12
	@echo "variables: CONFIG=$(CONFIG) ARGS=\"--key value\" PYTEST_ARGS=\"-m 'not slow'\" TEST_PROCESSES=$(TEST_PROCESSES) PYTHON=$(PYTHON)"

setup: $(SETUP)  ## create .venv with the project, its checks, the robotics simulators and ONNX

$(SETUP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
		if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))"; then \
			echo "claw-lightning needs Python 3.11 or newer, found: $$($(or $(PYTHON),echo none) --version 2>&1)." >&2; \
			echo "Install one and name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; \
		fi; \
		echo "creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV) || exit 1; \
	fi
	@$(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "$(VENV) holds $$($(BIN)/python --version), Python 3.11 or newer is needed: remove $(VENV)." >&2; exit 1; }
	$(PIP_INSTALL) -e '.[dev,robotics,report-png,export,ray]'
	@touch $@

$(SETUP_COMPARE): $(SETUP)
	$(PIP_INSTALL) -e '.[compare]'
	@touch $@

train: $(SETUP)  ## train: make train CONFIG=conf/pendulum.yaml ARGS="--trainer.max_steps 1000"
	$(BIN)/lightning fit --config $(CONFIG) $(ARGS)

test: lint  ## lint, then all tests: make test PYTEST_ARGS="-m 'not slow'"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(SETUP)  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy claw_lightning callbacks $(SCRIPTS)

format: $(SETUP)  ## let ruff mend and format the source
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(SETUP)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

compare: $(SETUP_COMPARE)  ## compare with stable-baselines3 on the same task
	$(BIN)/python scripts/compare_sb3.py $(ARGS)

# Peers are measured where their environments are there (scripts/benchmark.py peers); CI has none.
benchmark-smoke: $(SETUP)  ## every suite of the benchmark for seconds: does everything run?
	@printf '%s\n' endtoend faults callbacks learner collect replay scale | \
		xargs -P 2 -I '{}' $(BIN)/python scripts/benchmark.py '{}' --quick --strict $(ARGS)

clean:  ## remove builds and caches (not .venv, not runs/)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
