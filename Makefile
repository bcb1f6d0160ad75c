# Every target makes its own environment; when nothing changed, that costs nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two workers, one thread each: on two cores faster than one worker with two threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2
# What pyproject.toml's lower bounds promise, in an environment of its own.
LOWEST := $(VENV)-lowest

.PHONY: help install demo test test-slow test-lowest test-gpu lint format bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	@touch $(STAMP)

install: $(STAMP)  ## make the environment

demo: $(STAMP)  ## train the four nano networks on digits and write runs/demo/report.html
	$(BIN)/nearsight demo

test: $(STAMP)  ## run the tests (minutes on two cores)
	$(PYTEST) -n $(WORKERS) -m "not slow and not gpu"

test-slow: $(STAMP)  ## run the slow tests: Inductor on big networks, long sweeps
	$(PYTEST) -m "slow and not gpu"

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt --editable '.[all,dev]'
	@touch $@

test-lowest: $(LOWEST)/.installed  ## run the tests with the oldest versions of everything that are supported
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(WORKERS) -m "not slow and not gpu"

test-gpu: $(STAMP)  ## run the tests that need a CUDA device
	$(PYTEST) -m gpu

lint: $(STAMP)  ## ruff (check and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## time the ops on this machine beside their peers
	$(BIN)/nearsight bench ops

clean:  ## remove the environment and the caches
	rm -rf $(VENV) $(LOWEST) build dist .mypy_cache .ruff_cache .hypothesis
