.DEFAULT_GOAL := help
SHELL := bash
PY := .venv/bin/python
READY := .venv/.installed
CODE := operator trainer charts tests scripts benchmarks

.PHONY: help setup demo test test-fast lint types fmt manifests programs images lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## Create .venv from the hashed locks

$(READY): requirements/dev.txt requirements/uv.txt pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh

demo: $(READY) ## Train a tiny Ling2 on real text, then halt a run with an injected NaN
	@$(PY) scripts/demo.py

programs: $(READY) ## Build the control plane that the tests run against (once)
	@$(PY) tests/cluster/build_programs.py

test: lint types ## Everything: lint, types, all tests, the real control plane included
	@bash scripts/install_node_packages.sh || true # without them the tests say what they did not do
	@$(PY) tests/cluster/build_programs.py || true # without it the cluster tests say so
	@$(PY) -m pytest

test-fast: $(READY) ## Tests that need neither the control plane nor much time
	@$(PY) -m pytest -m "not cluster and not slow"

lint: $(READY) ## ruff, import-linter, codespell, hadolint
	@.venv/bin/ruff check $(CODE)
	@.venv/bin/ruff format --check $(CODE)
	@.venv/bin/lint-imports
	@.venv/bin/hadolint Dockerfile
	@.venv/bin/codespell operator trainer tests scripts benchmarks docs manifests charts README.md CONTRIBUTING.md CHANGELOG.md

types: $(READY) ## pyright
	@.venv/bin/pyright

fmt: $(READY) ## Format the code
	@.venv/bin/ruff check --fix-only --quiet $(CODE)
	@.venv/bin/ruff format $(CODE)

images: ## Build both images; BASE, EXTRA, TAG, REPOSITORY: see scripts/build_images.sh
	@bash scripts/build_images.sh

manifests: $(READY) ## Write what is generated: manifests/crd, the chart's CRD, README and Grafana files, docs/metrics.md
	@$(PY) -m ling_operator.crd
	@$(PY) scripts/chart_files.py
	@$(PY) scripts/grafana_dashboards.py
	@$(PY) scripts/metrics_docs.py

lock: $(READY) ## Resolve requirements/ again from pyproject.toml
	@bash scripts/lock.sh

clean: ## Remove what the other targets made in this folder
	rm -rf .venv demo runs build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
