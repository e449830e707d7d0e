# Every target sets up what it needs in .venv, once. `make help` lists those for every day, docs/tests.md those for tests.

SHELL := /bin/bash
# Without bytecode, each worker compiles all test files anew: 15 seconds of CPU time to collect the tests, not 8.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
GPU_WORKERS ?= 8

VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python
# Test processes share the cores: one thread each.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest
SHARED := -n $(WORKERS) --dist worksteal
# What `make test` runs on the CPU.
ON_CPU := not gpu and not interpreter and not exhaustive and not thorough
# The test files that contain an expression. To import all of them takes each worker ten seconds.
FILES_WITH = $$(grep -lrE '$(1)' tests --include='test_*.py')
INTERPRETED = $(call FILES_WITH,\btarget\b|interpreter)

.DEFAULT_GOAL := help
.PHONY: help setup test test-cpu test-interpreter test-quick test-thorough test-thorough-cpu test-thorough-interpreter \
  test-instruction-sets test-numerical-avx2 test-numerical-sse test-compile test-architectures \
  test-hopper-interpreted test-parallel test-newest-triton test-oldest-triton test-torch test-oldest-torch \
  test-oldest-libraries test-gpu lint fuzz mutants soak \
  bench docs dist kernels hub inspect demo clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

$(READY): pyproject.toml scripts/setup-venv
	@bash scripts/setup-venv "$(PYTHON)" "$(VENV)"
	@touch $@

setup: $(READY) ## the virtual environment alone

test: $(READY) ## all that runs without a GPU: lint, CPU tests, interpreter tests; before each commit
	+@bash scripts/run-parts lint test-cpu test-interpreter

test-cpu: $(READY)
	$(PYTEST) tests $(SHARED) -m "$(ON_CPU)"

test-interpreter: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) $(SHARED) -m "interpreter and not thorough"

test-quick: $(READY) ## ruff and quick tests of every kind of call, in a minute; while you work
	$(RUN) -m ruff check .
	$(PYTEST) $(call FILES_WITH,mark.quick) $(SHARED) -m "quick and not slow and $(ON_CPU)" -k "not compile"

test-thorough: $(READY) ## tests that are slow and resemble those of `make test`
	+@bash scripts/run-parts test-thorough-cpu test-thorough-interpreter

test-thorough-cpu: $(READY)
	$(PYTEST) tests $(SHARED) -m "thorough and not gpu and not interpreter and not exhaustive"

test-thorough-interpreter: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) $(SHARED) -m "interpreter and thorough"

# Tests whose results depend on vector instructions, on CPUs with AVX2, and with neither AVX2 nor AVX-512.
test-instruction-sets: $(READY)
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
	$(PYTEST) $(call FILES_WITH,mark.numerical) $(SHARED) -m "numerical and not compile and not slow and $(ON_CPU)" \
	  -k "not (refused or opcheck or compiled or graph or inductor or export)"

test-compile: $(READY) ## compile every configuration of every kernel
	$(PYTEST) tests/backends/test_compile.py $(SHARED)

mutants: $(READY) ## plant faults and count those that tests notice; SAMPLE=30, SEED=, ARGS=
	$(RUN) scripts/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/engine/server $(RUN) tests/engine/server/soak.py $(or $(SECONDS),600)

fuzz: $(READY) ## random calls against an oracle; SECONDS=600, SEED=, JOBS=, DEVICE=cuda, ARGS="--family caches"
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(RUN) -m fuzz --seconds $(or $(SECONDS),600) --device $(or $(DEVICE),cpu) \
	  --jobs $(or $(JOBS),1) $(if $(SEED),--seed $(SEED)) $(ARGS)

test-hopper-interpreted: $(READY)
	$(PYTEST) tests/backends/hopper/test_hopper_interpreted.py $(SHARED)

test-parallel: $(READY)
	$(PYTEST) tests/parallel

test-architectures: $(READY)
	$(PYTEST) tests/backends/architectures.py $(SHARED)

test-newest-triton: $(READY)
	OMP_NUM_THREADS=1 bash scripts/with-release $(VENV) triton \
	  $(RUN) -m pytest tests/backends/newest_triton.py -m "not exhaustive" $(SHARED) $(ARGS)

# The oldest Triton that the package takes.
test-oldest-triton: $(READY)
	OMP_NUM_THREADS=1 bash scripts/with-release $(VENV) triton==3.6.0 \
	  $(RUN) -m pytest tests/backends/test_compile.py -m "not exhaustive" $(SHARED)

# With another torch and its Triton: TORCH=2.12.0; the newest if TORCH is not given.
test-torch: $(READY)
	OMP_NUM_THREADS=1 bash scripts/with-release $(VENV) torch$(addprefix ==,$(TORCH)) \
	  $(RUN) -m pytest $(call FILES_WITH,mark.quick) tests/operators $(SHARED) -m "not slow and $(ON_CPU)" -k "not compile"

test-oldest-torch:
	$(MAKE) test-torch TORCH=2.11.0

# The oldest Transformers and Diffusers that the integrations take.
test-oldest-libraries: $(READY)
	OMP_NUM_THREADS=1 bash scripts/with-release $(VENV) 'transformers==5.17.0 huggingface-hub<2' \
	  $(RUN) -m pytest tests/integrations/test_transformers*.py $(SHARED) -m "$(ON_CPU)"
	OMP_NUM_THREADS=1 bash scripts/with-release $(VENV) diffusers==0.37.0 \
	  $(RUN) -m pytest tests/integrations/test_diffusers.py $(SHARED) -m "$(ON_CPU)"

test-gpu: $(READY) ## GPU tests, memcheck if compute-sanitizer is on PATH, ten minutes of random calls
	$(PYTEST) tests -n $(GPU_WORKERS) --dist worksteal -m "gpu and not huge"
	$(PYTEST) tests -n $$(nvidia-smi -L | wc -l) -m "gpu and huge"
	@if command -v compute-sanitizer >/dev/null; then \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	    $(RUN) tests/gpu/sanitizer_cases.py && \
	  PYTHONPATH=.:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	    --target-processes all $(RUN) -m fuzz --device cuda --seconds 120 --jobs $(GPU_WORKERS) --family attention --family caches --family doors; \
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

kernels: $(READY) ## a wheel of compiled kernels, in dist/; hours of one core; ARGS="--arch sm_80"
	$(RUN) scripts/make_kernels.py $(ARGS)

# The repository that Hugging Face kernels loads, in build/hub.
hub: $(READY)
	$(RUN) scripts/make_hub.py

inspect: $(READY)
	$(RUN) -m flashtile inspect $(ARGS)

demo: $(READY)
	$(RUN) -m flashtile demo

lint: $(READY) ## ruff and mypy
	$(RUN) -m ruff check .
	MYPY_NUM_WORKERS=$(WORKERS) $(RUN) -m mypy

clean: ## remove the virtual environment, caches and outputs
	rm -rf $(VENV) build dist *.egg-info flashtile-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
