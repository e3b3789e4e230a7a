# Every target works from a bare clone: it creates .venv and installs dependencies when they change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test soak check format bench docs clean

setup: $(VENV)/.dev

demo: $(VENV)/.user
	$(BIN)/vitkit demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

soak: $(VENV)/.dev
	$(BIN)/python tests/soak/soak.py --full

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/check_words.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python bench/forward_backward.py
	$(BIN)/python bench/training.py --write BENCHMARKS.md
	$(BIN)/python bench/engines.py --write BENCHMARKS.md

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Stamp files: an environment is updated when the dependencies or their pins change.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vitkit needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.user

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.user
