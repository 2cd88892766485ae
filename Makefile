# One command each; people and CI run the same. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-ci lint format bench upstream notebooks clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# The environment. Two stages, so that a demo does not wait for the test tools.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "This project needs Python 3.11 or later; $(PYTHON) is older. Use: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing the project into $(VENV) (a minute or so) ..."
	$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[notebooks]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV) (a minute or so) ..."
	$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[notebooks,dev]'
	@touch $@

demo: $(VENV)/.installed ## run notebooks/quickstart.ipynb in a MicroVM of the local service
	$(BIN)/jupyter-microvm kernelspec install --sys-prefix --replace
	$(BIN)/jupyter-microvm run notebooks/quickstart.ipynb --output-dir demo-output

test: $(VENV)/.installed-dev ## the tests (at most 8 minutes on 2 cores)
	$(PYTEST) -m "not long and not upstream and not serial" -n 2 --dist loadfile
	$(PYTEST) -m "serial and not long and not upstream"

test-full: test upstream ## everything: the long series and the upstream suites
	HYPOTHESIS_PROFILE=search $(PYTEST) -m "long" --timeout 3600

test-ci: $(VENV)/.installed-dev ## the part of test-full that fits CI's hour (no upstream suites, no hour-long searches)
	$(PYTEST) -m "long" -k "not for_long" --timeout 1800

upstream: $(VENV)/.installed-dev ## other projects' test suites through our provisioner
	$(BIN)/python tests/upstream/run.py

notebooks: $(VENV)/.installed-dev ## execute the demo notebooks
	$(PYTEST) tests/e2e/test_notebooks.py

lint: $(VENV)/.installed-dev ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## let ruff format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev ## us and the stock local provisioner side by side (JSON lines)
	$(BIN)/python bench/run.py

clean: ## end the local service of this checkout's user and remove build products
	-$(BIN)/jupyter-microvm local stop
	rm -rf build dist demo-output artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
