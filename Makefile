# Needs make and Python 3.11 or newer. All else is installed into .venv, by pip alone.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv check test test-all stress demo demo-payments docs clean \
	bench-peers bench-jobs bench-ownership bench-relay bench-consume bench-gates bench-spark \
	bench-coordination

BIN := .venv/bin
NEW_ENOUGH := 'import sys; sys.exit(sys.version_info < (3, 11))'
TIMES ?= 20
BUSY ?= 8
PAYMENTS ?= all
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: .venv/installed ## Make .venv with everything that the project needs
.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "jobs_lib needs Python 3.11 or newer, and finds" \
		"$$(python3 --version 2>&1): install one, or say make PYTHON=/path/to/python"; exit 1; } >&2
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

check: venv ## Lint, types, import direction, dead links, generated pages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m scripts.links
	$(BIN)/python -m scripts.guarantees --check
	$(BIN)/python -m scripts.settings --check
	$(BIN)/python -m scripts.observe --check

test: check ## check, and the everyday tests (report: build/junit.xml)
	$(BIN)/python -m scripts.tests

test-all: check ## test, and what is slow or needs system packages (apt, when root)
	$(BIN)/python -m scripts.tests --all

stress: venv ## TESTS="file …" many times beside busy processes; TIMES=20 BUSY=8
	$(BIN)/python -m scripts.stress --times $(TIMES) --busy $(BUSY) $(TESTS)

demo: venv ## The example on real data; FLIGHTS=n takes only n flights
	$(BIN)/python -m examples.flights.demo

demo-payments: venv ## Services that wait for each other; PAYMENTS=n takes only n
	$(BIN)/python -m examples.payments.demo --payments $(PAYMENTS)

bench-peers: venv ## Install what bench-jobs, -relay and -consume compare with
	$(BIN)/python -m benchmarks.peers setup

bench-jobs: venv ## Measure the jobs on this machine, beside those libraries
	$(BIN)/python -m benchmarks.jobs

bench-relay: venv ## Measure the relay: rows a second, latency, an outage
	$(BIN)/python -m benchmarks.relay

bench-consume: venv ## Measure consumers: records a second, latency, kills
	$(BIN)/python -m benchmarks.consume

bench-gates: venv ## Measure gates between services, and streams
	$(BIN)/python -m benchmarks.gates

bench-spark: venv ## Measure re-exports: planning, and loading by Spark
	$(BIN)/python -m benchmarks.spark

bench-ownership: venv ## Measure take-overs, rebalances, zombies and several executors
	$(BIN)/python -m benchmarks.ownership

bench-coordination: venv ## Measure coordination over a topic, beside consumer groups
	$(BIN)/python -m benchmarks.coordination

docs: venv ## Write the generated pages of docs/ anew
	$(BIN)/python -m scripts.guarantees
	$(BIN)/python -m scripts.settings
	$(BIN)/python -m scripts.observe

clean: ## Remove .venv and all that was built
	rm -rf .venv build dist .*_cache
