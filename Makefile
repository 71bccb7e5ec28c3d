# What is done to this project, by name. Needs Python 3.11 or newer, and make.
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := pgbouncer faketime postgresql
TOO_OLD := import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or newer \
is needed, this is %s: name another as in `make PYTHON=python3.12`" % sys.version)
.PHONY: help venv check test test-all demo bench-jobs docs clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv: .venv/installed ## Make .venv with everything the project needs
.venv/installed: pyproject.toml
	@$(PYTHON) -c '$(TOO_OLD)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

check: venv ## Lint, types, import direction, links, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m scripts.links
	$(BIN)/python -m scripts.settings --check
	$(BIN)/python -m scripts.guarantees --check

test: check ## Check, then run the tests that take seconds
	$(BIN)/pytest -m "not slow" --junit-xml=build/junit.xml

test-all: check ## Run the slow tests too; as root, install the packages they need
	@# RUNLEVEL=1: Debian shall not start the servers, the tests do it themselves.
	-test "$$(id -u)" -ne 0 || RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
	apt-get install -qy --no-install-recommends $(PACKAGES)
	$(BIN)/pytest --junit-xml=build/junit.xml

demo: venv ## Run the whole flow on real data
	$(BIN)/python -m examples.flights.demo
bench-jobs: venv ## Measure jobs per second
	$(BIN)/python -m benchmarks.jobs
docs: venv ## Write the generated pages anew
	$(BIN)/python -m scripts.settings
	$(BIN)/python -m scripts.guarantees
clean: ## Remove what was built, .venv too
	rm -rf .venv build dist .*_cache
