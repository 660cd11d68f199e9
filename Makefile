# One command per wish; `make` alone lists them. Every target first makes .venv ready (see .make/setup.py),
# which installs nothing when nothing changed.
#   PYTHON=python3.12   the interpreter .venv is made from        MODEL=tiny   another model for lab and demo
#   BENCH=NAME          one benchmark for `make bench`            ARGS="-k kv" extra arguments for pytest or JupyterLab

PYTHON ?= python3
MODEL  ?= smollm2-135m
BENCH  ?= all
ARGS   ?=
BIN    := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup lab demo test lint format bench nightly wheel

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup:  ## create .venv and install what the workbench needs
	@$(PYTHON) .make/setup.py

lab: setup  ## open JupyterLab on your copies of the notebooks (lab/), with the default model fetched
	@$(BIN)/workbench fetch $(MODEL) || echo "$(MODEL) cannot be had here; the notebooks run on the shipped model."
	@$(BIN)/workbench lab $(ARGS)

demo: setup  ## run the first notebook headless, print its results, write reports/00_start.html
	@$(BIN)/workbench fetch $(MODEL)
	@$(BIN)/python .make/demo.py $(MODEL)

test: setup  ## the tests of every commit
	@$(BIN)/pytest -q -rs $(ARGS)

lint: setup  ## style, types, layers, stripped notebooks
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(if $(wildcard notebooks/*.ipynb),$(BIN)/nbstripout --keep-id --verify $(wildcard notebooks/*.ipynb))

format: setup  ## apply the style: sort imports, format, strip notebooks
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@$(if $(wildcard notebooks/*.ipynb),$(BIN)/nbstripout --keep-id $(wildcard notebooks/*.ipynb))

bench: setup  ## measure this machine: BENCH=NAME for one benchmark
	@$(BIN)/workbench bench $(BENCH)

nightly: setup  ## every test, with the full products of dimensions and more examples per property
	@HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -q -rs -m 'not bench' --timeout 3600 $(ARGS)

wheel: setup  ## build the wheel and import everything from it, away from the checkout
	@$(BIN)/python .make/check_wheel.py
