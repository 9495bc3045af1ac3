# Everything a newcomer, a developer or CI runs. `make help` lists it.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check golden bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## set up, make a sample library, search it, serve the page until Ctrl-C
	$(BIN)/gare demo

test: check ## set up, then lint, types and every test
	$(BIN)/pytest

check: $(READY) ## set up, then lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

golden: $(READY) ## rewrite our own golden numbers (alone in a commit, with the reason)
	GARE_WRITE_GOLDEN=1 $(BIN)/pytest -q tests/golden/test_own.py

bench: $(READY) ## speed, with the reference beside it
	$(BIN)/gare bench scoring

clean: ## remove the virtual environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
