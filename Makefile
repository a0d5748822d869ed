# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RIVALS := .venv-rivals
RIVALS_STAMP := $(RIVALS)/.installed
# Data for the tests and experiments that need it; without it they are skipped and say so.
ifneq ($(wildcard ../shared/data),)
export LAPWING_DATA ?= $(abspath ../shared/data)
endif

.PHONY: demo test test-slow zoo format bench rivals experiment docs clean

demo: $(STAMP)
	$(BIN)/lapwing demo

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site
	$(BIN)/pytest

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

zoo: $(STAMP)
	$(BIN)/pytest -m "zoo or not zoo" tests/test_zoo.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Lapwing and, in an environment of their own, the rivals. CASES='lenet5/*' takes some of the cases.
bench: $(STAMP) $(RIVALS_STAMP)
	$(BIN)/python -m benchmarks $(CASES)

rivals: $(RIVALS_STAMP)

# One of the folders in experiments/, for example NAME=widths.
experiment: $(STAMP)
	$(BIN)/python -m experiments.$(NAME)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(RIVALS_STAMP): benchmarks/rivals.txt requirements-dev.txt
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet --constraint requirements-dev.txt torch numpy scipy safetensors tqdm setuptools
	$(RIVALS)/bin/python -m pip install --quiet --no-deps --requirement benchmarks/rivals.txt
	touch $@

clean:
	rm -rf $(VENV) $(RIVALS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
