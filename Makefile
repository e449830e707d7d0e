# Every target sets up what it needs in .venv, once. `make help` lists them.

SHELL := /bin/bash
PYTHON ?= python3
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
GPU_WORKERS ?= 8

VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python
# Test processes share the cores: one thread each.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest tests
# Results of these depend on how the CPU computes; those of refusals, graphs and counts do not.
NUMERICAL := tests/api tests/checks tests/problems tests/operators tests/masks tests/reference tests/testing tests/test_dropout.py \
  tests/test_nn.py tests/backends/test_{conformance,decode_properties,fp8_quantize,hypothesis,properties}.py tests/backends/cpu tests/op/test_results_into.py tests/op/test_growing_cache.py \
  tests/kv_cache tests/compat tests/integrations tests/parallel tests/engine/test_engine_models.py tests/learn/algorithms tests/hardware
NOT_NUMERICAL := refused or opcheck or compiled or graph or inductor or export or benchmark or counts or programs
# Of each family results and refusals, and the memory of a cache and the texts of an engine.
QUICK := tests/backends/test_conformance.py tests/backends/test_properties.py tests/api/test_functional.py tests/operators/test_autograd.py \
  tests/checks/test_bad_input.py tests/api/test_decode.py tests/api/test_append.py tests/api/test_decode_cache.py \
  tests/checks/test_decode_bad_input.py tests/masks tests/api/test_fp8.py tests/api/test_linear.py tests/op/test_selection.py \
  tests/op/test_plain_path.py tests/kv_cache/test_manager.py tests/engine/test_engine_scheduler.py \
  tests/engine/test_engine_texts.py tests/test_house.py
# Only files with one of these words have interpreted tests. To import the others takes a worker ten seconds.
INTERPRETED = $$(grep -lrE '\btarget\b|interpreter' tests --include='test_*.py')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-cpu test-interpreter test-quick test-thorough test-thorough-cpu test-thorough-interpreter test-instruction-sets test-numerical-avx2 test-numerical-sse test-compile record-compiled test-architectures test-hopper-interpreted test-parallel mutants test-newest-triton test-oldest-triton test-gpu bench docs dist kernels hub inspect lint clean soak fuzz

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

$(READY): pyproject.toml scripts/setup-venv
	@bash scripts/setup-venv "$(PYTHON)" "$(VENV)"
	@touch $@

setup: $(READY) ## the virtual environment alone

demo: $(READY) ## exactness, speed, memory and a small training run; writes flashtile-demo/
	$(RUN) -m flashtile demo

test: $(READY) ## all that runs without a GPU: lint, test-cpu, test-interpreter, even if one fails
	+@bash scripts/run-parts lint test-cpu test-interpreter

test-cpu: $(READY)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not gpu and not interpreter and not exhaustive and not thorough"

test-interpreter: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(RUN) -m pytest $(INTERPRETED) -n $(WORKERS) --dist worksteal -m "interpreter and not thorough"

test-quick: $(READY) ## the tests that tell most, in a minute or two
	$(RUN) -m ruff check .
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(QUICK) -n $(WORKERS) --dist worksteal \
	  -m "not gpu and not interpreter and not exhaustive and not thorough and not slow" -k "not compile"

test-thorough: $(READY) ## what differs little from a test of make test, and costs much; CI runs it
	+@bash scripts/run-parts test-thorough-cpu test-thorough-interpreter

test-thorough-cpu: $(READY)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "thorough and not gpu and not interpreter and not exhaustive"

test-thorough-interpreter: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(RUN) -m pytest $(INTERPRETED) -n $(WORKERS) --dist worksteal -m "interpreter and thorough"

test-instruction-sets: $(READY) ## what is computed on the CPU, as CPUs with AVX2 and with neither that nor AVX-512 compute it
	+@bash scripts/run-parts test-numerical-avx2 test-numerical-sse

test-numerical-avx2: export ATEN_CPU_CAPABILITY = avx2
test-numerical-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-numerical-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-numerical-avx2: export OPENBLAS_CORETYPE = Haswell
test-numerical-sse: export ATEN_CPU_CAPABILITY = default
test-numerical-sse: export ONEDNN_MAX_CPU_ISA = SSE41
test-numerical-sse: export MKL_ENABLE_INSTRUCTIONS = SSE4_2
test-numerical-sse: export OPENBLAS_CORETYPE = Nehalem
test-numerical-avx2 test-numerical-sse: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(NUMERICAL) -n $(WORKERS) --dist worksteal \
	  -m "not gpu and not interpreter and not compile and not exhaustive and not slow" -k "not ($(NOT_NUMERICAL))"

test-compile: $(READY) ## compile every configuration of every kernel; make test compiles one of each, make test-thorough the telling ones
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/backends/test_compile.py -n $(WORKERS) --dist worksteal

record-compiled: $(READY) ## compile the configurations that have changed since, and record what the compiler says of them
	$(RUN) tests/backends/compile_record.py

mutants: $(READY) ## plant faults drawn from the source and count those that the tests notice; SAMPLE=30, SEED=, ARGS=
	$(RUN) scripts/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(READY) ## two replicas of a server under load and abuse for SECONDS=600; the exit code says whether all was well
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/engine/server $(RUN) tests/engine/server/soak.py $(or $(SECONDS),600)

fuzz: $(READY) ## random calls of every public function against an oracle for SECONDS=600; SEED=, JOBS=, DEVICE=cuda, ARGS="--family caches"
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(RUN) -m fuzz --seconds $(or $(SECONDS),600) --device $(or $(DEVICE),cpu) \
	  --jobs $(or $(JOBS),1) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-hopper-interpreted: $(READY) ## the Hopper kernels without a card: every mask and configuration, in several orders of events
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/backends/hopper/test_hopper_interpreted.py -n $(WORKERS) --dist worksteal

test-parallel: $(READY) ## context parallelism in every method, layout and mask; make test has the telling ones
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/parallel

test-architectures: $(READY) ## compile portable kernels for GPUs that nobody measured them on, AMD's among them
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/backends/architectures.py -n $(WORKERS) --dist worksteal

test-newest-triton: $(READY) ## compile the Hopper kernels with the newest released Triton
	OMP_NUM_THREADS=1 bash scripts/with-triton $(VENV) triton \
	  $(RUN) -m pytest tests/backends/newest_triton.py -m "not exhaustive" -n $(WORKERS) --dist worksteal $(ARGS)

test-oldest-triton: $(READY) ## compile all kernels, as make test-thorough does, with the oldest Triton that the package takes
	OMP_NUM_THREADS=1 bash scripts/with-triton $(VENV) triton==3.6.0 \
	  $(RUN) -m pytest tests/backends/test_compile.py -m "not exhaustive" -n $(WORKERS) --dist worksteal

test-gpu: $(READY) ## what needs a GPU, memcheck where compute-sanitizer is installed, ten minutes of random calls
	$(PYTEST) -n $(GPU_WORKERS) --dist worksteal -m "gpu and not huge"
	$(PYTEST) -n $$(nvidia-smi -L | wc -l) -m "gpu and huge"
	@if command -v compute-sanitizer >/dev/null; then \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	    $(RUN) tests/gpu/sanitizer_cases.py && \
	  PYTHONPATH=.:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	    --target-processes all $(RUN) -m fuzz --device cuda --seconds 120 --jobs $(GPU_WORKERS) --family attention --family caches; \
	else \
	  echo "compute-sanitizer is not on PATH: memcheck left out"; \
	fi
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(RUN) -m fuzz --device cuda --seconds 600 --jobs $$(nproc)

bench: $(READY) ## time attention against its peers; ARGS="--help" for the options
	$(RUN) -m benchmarks $(ARGS)

docs: $(READY) ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

dist: $(READY) ## a wheel and an sdist, in dist/
	$(RUN) scripts/make_dist.py

kernels: $(READY) ## a wheel of compiled kernels for the installed Triton, in dist/; hours of one core; ARGS="--arch sm_80"
	$(RUN) scripts/make_kernels.py $(ARGS)

hub: $(READY) ## the repository that Hugging Face kernels loads, in build/hub
	$(RUN) scripts/make_hub.py

inspect: $(READY) ## registers, spills and tensor-core use of every kernel, without a GPU
	$(RUN) -m flashtile inspect $(ARGS)

lint: $(READY) ## ruff and mypy
	$(RUN) -m ruff check .
	MYPY_NUM_WORKERS=$(WORKERS) $(RUN) -m mypy

clean: ## remove the virtual environment, caches and outputs
	rm -rf $(VENV) build dist *.egg-info flashtile-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
