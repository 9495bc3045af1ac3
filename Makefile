# Everything a newcomer, a developer or CI runs. `make help` lists it.

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
READY := .venv/.ready
UV ?= uv
CYCLONEDX ?= cyclonedx-py
PIP_AUDIT ?= pip-audit
LOCK_FLAGS ?= --torch-backend cpu

RUNS ?= 200
SEED ?= 1
STORE ?= folder

.PHONY: help demo test check docs golden bench crash torture lock sbom audit clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# Every file has one of the hashes in requirements.lock. What is left for the second line is torch, whose file
# depends on the hardware, and this package, built with what the first line installed.
$(READY): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## set up, make a sample library, search it, serve the page until Ctrl-C
	$(BIN)/gare demo

test: check ## set up, then lint, types and every test
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(READY) ## set up, then lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

docs: $(READY) ## set up, then build the docs as a site (python3 -m http.server -d build/site)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

golden: $(READY) ## rewrite our own golden numbers (alone in a commit, with the reason)
	GARE_WRITE_GOLDEN=1 $(BIN)/pytest -q tests/golden/test_own.py

bench: $(READY) ## speed, with the reference beside it
	$(BIN)/gare bench scoring

crash: $(READY) ## stop every operation at every write, and cut the power; takes hours
	$(BIN)/python tests/crash_points.py
	$(BIN)/python tests/power_cut.py

torture: $(READY) ## RUNS=200 SEED=1 STORE=folder: random histories of a library, compared with a fresh index
	$(BIN)/python tests/library_machine.py --runs $(RUNS) --seed $(SEED) --store $(STORE)

lock: ## write requirements.lock: versions of constraints.txt, with the hashes of their files (needs uv, a network)
	$(UV) pip compile --quiet --upgrade --generate-hashes --only-binary :all: --no-emit-package torch --no-annotate \
	  --no-header --extra dev -c constraints.txt $(LOCK_FLAGS) -o requirements.lock pyproject.toml

sbom: $(READY) ## list what is installed, with versions and licences: build/sbom.json (needs cyclonedx-bom)
	mkdir -p build
	$(CYCLONEDX) environment $(BIN)/python --pyproject pyproject.toml --of JSON -o build/sbom.json

audit: ## look up known vulnerabilities of what is locked (needs pip-audit, a network)
	$(PIP_AUDIT) --require-hashes --disable-pip -r requirements.lock

clean: ## remove the virtual environment and caches
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
