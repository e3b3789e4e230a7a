# Every target works from a bare clone: it creates .venv and installs dependencies when they change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

.PHONY: setup demo test test-gpu test-lowest soak check check-docs format bench docs notebooks clean

setup: $(VENV)/.dev

demo: $(VENV)/.user
	$(BIN)/vitkit demo

# Bytecode is kept, or each of the many processes would compile vitkit and the tests again.
test soak: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.dev
	$(BIN)/python -m pytest

# Tests hide GPUs; these smoke tests use one.
test-gpu: $(VENV)/.dev
	VITKIT_TEST_GPU=1 $(BIN)/python -m pytest -n 0 tests/gpu

# The lowest versions that pyproject.toml admits, in an environment of their own. Warnings are not errors there: old
# releases warn about newer ones of their own dependencies.
test-lowest: constraints-lowest.txt pyproject.toml
	PYTEST_ADDOPTS='-W default' $(MAKE) test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

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

# Run the notebooks and store their outputs.
notebooks: $(VENV)/.dev
	$(BIN)/python tools/run_notebooks.py

# The same as `make docs`, in the environment of the tests.
check-docs: $(VENV)/.dev
	$(BIN)/sphinx-build -W --keep-going -q -b dummy docs docs/_build/check

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Stamp files: an environment is updated when the dependencies or their pins change. One that is incomplete or has an old
# Python is not repaired, because it may be the user's.
CHECK_PYTHON := import sys; sys.exit(sys.version_info < (3, 11) and "vitkit needs Python 3.11 or newer; try make PYTHON=python3.12")
CHECK_VENV := import pip, sys; sys.exit(sys.version_info < (3, 11))

$(VENV)/.created:
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@if [ -e $(VENV) ] && ! $(BIN)/python -c '$(CHECK_VENV)' 2>/dev/null; then \
	  echo "$(VENV) is incomplete or has a Python older than 3.11: delete it and run make again" >&2; exit 1; fi
	@[ -e $(VENV) ] || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.user: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.user

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.user
