# TokenSpeed: the commands of a checkout. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 200
MODEL ?= smollm2-135m
JOBS ?= 2
NATIVE := CMakeLists.txt $(shell find csrc -name '*.h' -o -name '*.cc' -o -name 'CMakeLists.txt')

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-full sanitize-cpu gpu bench-gpu gpu-pack test-clients test-clients-all check format sim mutants bench bench-control bench-cpu bench-server docs docs-control clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.base ## make .venv, install and build

$(VENV)/.base: pyproject.toml .ci/setup $(NATIVE)
	@PYTHON="$(PYTHON)" .ci/setup base

$(VENV)/.test: $(VENV)/.base
	@PYTHON="$(PYTHON)" .ci/setup test

$(VENV)/.check: $(VENV)/.test
	@PYTHON="$(PYTHON)" .ci/setup check

demo: $(VENV)/.base ## a three-turn conversation with the default model, over HTTP
	@$(BIN)/python -m tokenspeed.bench.demo --model "$(MODEL)"

serve: $(VENV)/.base ## serve MODEL=alias|folder|file.gguf|hub id on 127.0.0.1:8000 (more flags in ARGS)
	@$(BIN)/tokenspeed serve "$(MODEL)" $(ARGS)

test: $(VENV)/.test ## the tests, real models included
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-full: $(VENV)/.test ## the tests, slow ones and the 1.5B model included
	@$(BIN)/python -m pytest -m "(slow or not slow) and not clients and not gpu" $(ARGS)

build/clients/.installed: $(wildcard tests/clients/pins/*.txt)
	@PYTHON="$(PYTHON)" .ci/setup clients

build/clients/.benchmarks: $(wildcard tests/clients/pins/benchmarks/*)
	@PYTHON="$(PYTHON)" .ci/setup benchmarks

test-clients: $(VENV)/.test build/clients/.installed ## real agents and SDKs against the server, loopback only
	@.ci/loopback $(BIN)/python -m pytest tests/clients -m clients --ignore tests/clients/test_benchmarks.py $(ARGS)

test-clients-all: $(VENV)/.test build/clients/.installed build/clients/.benchmarks ## the same and others' benchmarks, 3 GB
	@.ci/loopback $(BIN)/python -m pytest tests/clients -m clients $(ARGS)

sanitize-cpu: $(VENV)/.test ## the CPU kernels under ASan and UBSan, on every instruction set that this machine runs
	@JOBS="$(JOBS)" .ci/sanitize-cpu $(ARGS)

gpu: ## on a GPU machine: build, check kernels and models, measure; works from a pack too, without a network
	@PYTHON="$(PYTHON)" .ci/gpu all

bench-gpu: ## the same without the tests: BENCH="kernel latency throughput" MODEL=folder OUT=folder
	@PYTHON="$(PYTHON)" .ci/gpu bench

gpu-pack: $(VENV)/.base ## one archive for a GPU machine without a network, with PEER=archive another engine's too
	@.ci/gpu-pack

check: $(VENV)/.check ## format, lint, types, layering
	@.ci/check

format: $(VENV)/.check ## rewrite the sources in the project's format
	@$(BIN)/ruff format src tests bench examples && $(BIN)/ruff check --fix src tests bench examples
	@find csrc -name '*.h' -o -name '*.cc' | xargs $${CLANG_FORMAT:-clang-format-19} -i

sim: ## the control plane's simulator under ASan and UBSan: make sim SEEDS=1000, or SEED=7 for one, SHOW=1 to see it
	@mkdir -p build
	@cmake -S . -B build/sim -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTOKENSPEED_TESTS=ON -DTOKENSPEED_SANITIZE=ON \
	  >build/sim.log 2>&1 || { cat build/sim.log; exit 1; }
	@cmake --build build/sim -j $(JOBS) --target control_sim control_tests >build/sim.log 2>&1 || { cat build/sim.log; exit 1; }
	@build/sim/csrc/control/control_sim $(if $(SEED),--seed '$(SEED)' \
	  $(if $(SHOW),--html 'build/sim-$(SEED).html'),--seeds '$(SEEDS)' --jobs '$(JOBS)' $(if $(SHOW),--show))

bench: $(VENV)/.test ## decode speed of the default model beside transformers, same run
	@$(BIN)/python bench/decode_cpu.py $(ARGS)

mutants: ## deliberate faults of the control plane, and who catches each: make mutants ARGS="--seeds 1000 [NAME ...]"
	@mkdir -p build
	@$(PYTHON) csrc/control/mutants/run.py --jobs $(JOBS) $(ARGS)

bench-control: $(VENV)/.base ## what planning costs: 128 running requests of 32k tokens in four cache groups
	@mkdir -p build
	@{ cmake -S . -B build/bench -DCMAKE_BUILD_TYPE=Release -DTOKENSPEED_BENCH=ON && \
	  cmake --build build/bench -j $(JOBS) --target control_bench; } >build/bench.log 2>&1 || { cat build/bench.log; exit 1; }
	@$(BIN)/python bench/control_plane.py build/bench/csrc/control/control_bench $(ARGS)

build/bench-cpu/.installed: bench/cpu/pins.txt bench/cpu/install_peer.py
	@$(PYTHON) bench/cpu/install_peer.py build/bench-cpu

build/bench-cpu/peaks: bench/cpu/peaks.cc
	@mkdir -p build/bench-cpu
	@$(CXX) -std=c++20 -O3 -march=native -pthread $< -o $@

bench-cpu: $(VENV)/.base build/bench-cpu/.installed build/bench-cpu/peaks ## beside llama.cpp on the same files, in turn: ratios
	@$(BIN)/python bench/cpu/compare.py $(ARGS)

bench-server: $(VENV)/.base ## what the API process costs: 256 streams, a long prompt, IPC, and each stage
	@$(BIN)/python bench/server.py $(ARGS)

build/mcp/tools.json: bench/mcp_servers.txt bench/mcp_tools.py
	@$(BIN)/python bench/mcp_tools.py build/mcp

bench-grammar: $(VENV)/.test build/mcp/tools.json ## what grammars cost a token, and how much of real tool schemas they enforce
	@$(BIN)/python bench/grammar.py build/mcp/tools.json $(ARGS)

docs: $(VENV)/.check ## the documentation as HTML in build/docs, links checked
	@$(BIN)/mkdocs build --strict --quiet --site-dir build/docs && echo "build/docs/index.html"

docs-control: ## the table and the diagram of docs/control-plane.md, from csrc/control/transitions.h
	@mkdir -p build
	@$(CXX) -std=c++20 -Icsrc/control csrc/control/tests/transition_table.cc -o build/transition_table
	@build/transition_table docs && echo "docs/control-plane.md"

clean: ## remove what was built, the environment included
	@rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +
