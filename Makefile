# From a bare checkout to a trained model or a tested tree. The virtual environment is made when it is missing, and
# installed into again when pyproject.toml or the tested versions change.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
VERSIONS := constraints/tested.txt
INSTALLED := $(VENV)/installed
# One thread a worker: more would compete for the cores.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.NOTPARALLEL:
.PHONY: help quickstart test slow test-axolotl check lint types contract pins clean

help:
	@echo "make quickstart   install, and train a small language model on Python's own source files"
	@echo "make test         install the test extra, and run all tests"
	@echo "make slow         run the tests of some minutes, which the others leave out"
	@echo "make test-axolotl  the plugin in the released Axolotl, in an environment of its own"
	@echo "make check        install the dev extra, and run lint, types, contract and test"
	@echo "make lint | types | contract   one of them"
	@echo "make pins         renew $(VERSIONS) from the newest versions"
	@echo "make clean        remove the virtual environment and all caches; runs/ stays"

quickstart: $(INSTALLED)
	$(BIN)/pumice train quickstart --resume auto

test: $(INSTALLED)-test
	$(PYTEST)

slow: $(INSTALLED)-test
	$(PYTEST) -m slow

# Axolotl pins what pumice has newer, and needs a GPU's packages only on a GPU: so its versions are listed, and it is
# installed without what it asks for beyond them.
AXOLOTL := .venv-axolotl
test-axolotl: $(AXOLOTL)/installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 $(AXOLOTL)/bin/python -m pytest tests/hosts/test_axolotl.py

$(AXOLOTL)/installed: constraints/axolotl.txt pyproject.toml
	"$(PYTHON)" -m venv $(AXOLOTL)
	$(AXOLOTL)/bin/python -m pip install --requirement constraints/axolotl.txt
	$(AXOLOTL)/bin/python -m pip install --no-deps axolotl==0.19.0 --editable .
	@touch $@

check: lint types contract test

lint: $(INSTALLED)-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)-dev
	$(BIN)/mypy

contract: $(INSTALLED)-dev
	$(BIN)/lint-imports

# An extra contains what the smaller installations have, so it stands for them too.
$(INSTALLED): EXTRA =
$(INSTALLED)-test: EXTRA = [test]
$(INSTALLED)-dev: EXTRA = [dev]
$(INSTALLED)-test: CONTAINED = $(INSTALLED)
$(INSTALLED)-dev: CONTAINED = $(INSTALLED) $(INSTALLED)-test

$(INSTALLED) $(INSTALLED)-test $(INSTALLED)-dev: pyproject.toml $(VERSIONS) | $(BIN)/pip
	$(BIN)/python -m pip install --constraint $(VERSIONS) --editable ".$(EXTRA)"
	@touch $@ $(CONTAINED)

# pip is the last thing that venv makes: without it the environment is only half there.
$(BIN)/pip:
	@command -v "$(PYTHON)" >/dev/null || { echo "no '$(PYTHON)' here: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit("pumice needs Python 3.11 or later, and $(PYTHON) is %d.%d: make PYTHON=python3.12" % v[:2] if v < (3, 11) else 0)'
	"$(PYTHON)" -m venv $(VENV)

pins:
	rm -rf .venv-pins
	"$(PYTHON)" -m venv .venv-pins
	.venv-pins/bin/python -m pip install --editable ".[dev]"
	{ sed '/^[^#]/d' $(VERSIONS); .venv-pins/bin/python -m pip freeze --all --exclude-editable | sed '/^pip==/d; s/+.*//'; } > $(VERSIONS).new
	mv $(VERSIONS).new $(VERSIONS)
	rm -rf .venv-pins

clean:
	rm -rf .venv .venv-ci .venv-pins .venv-axolotl .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
