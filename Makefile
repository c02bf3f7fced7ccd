# Everything for working on pynccl. Each target sets up what it needs, in .venv, and does nothing twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

HEADERS := $(wildcard pynccl/native/*.[ch] pynccl/native/*.inc pynccl/api/*.h)
CPU := $(wildcard pynccl/cpu/*/*.cpp)
SOURCES := $(HEADERS) $(CPU) $(wildcard pynccl/cpu/*/*.hpp pynccl/cpu/*/*.inc) pynccl/_build_ffi.py pynccl/_build_c.py setup.py
CXX_FILES := $(wildcard pynccl/cpu/*/*.?pp pynccl/torch/csrc/*.?pp tests/cpp/*.?pp tests/fake_cuda/*.c) $(filter-out %_api.h,$(HEADERS))
PYTHON_FILES := setup.py pynccl tests tools examples benchmarks
# Warnings are errors here, and not for those who install by pip.
export PYNCCL_WERROR := 1
# A build compiles all files of an extension of which one has changed; the others come from the cache.
CACHED := $(if $(shell command -v ccache),CC="ccache $(CC)" CXX="ccache $(CXX)" CCACHE_NOHASHDIR=1)

.PHONY: demo build test test-core test-pythons coverage test-slow test-full test-torch test-newest-torch test-gpu bench bench-programs lint format docs generate wheel sanitize cpu-lib clean

# Three at a time, on two cores: most tests wait, for processes that start or for time-outs.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile

demo: $(VENV)/demo $(VENV)/built
	$(BIN)/pynccl run -n 4 examples/data_parallel.py --check

build: $(VENV)/built

# The torch backend first: compiling it takes longer than a test may. These tests wait more than the slow ones.
test: $(VENV)/test $(VENV)/built
	$(BIN)/python -m pynccl.torch build
	$(PYTEST) -n 5 -m "not gpu and not full and not slow"

# A quick part, to run once with each Python; torch is too large to be installed for each.
CORE_TESTS := $(addprefix tests/,communicator/test_operations.py communicator/test_groups.py communicator/test_prepared.py \
	library/test_capi.py package/test_import.py init/test_init.py)

test-core: $(VENV)/test-core $(VENV)/built
	TESTS_WITHOUT=torch PYTHONDEVMODE=$(DEVMODE) $(PYTEST) $(CORE_TESTS) -m "not gpu and not full and not slow"

# The oldest Python that pynccl supports, and the newest one found, which runs in its development mode.
test-pythons:
	$(PYTHON) tools/pythons.py

# Lines of Python, C and C++ that a part of the tests executes; fails below tools/coverage_floors.json.
coverage: $(VENV)/test $(VENV)/built
	$(BIN)/python tools/measure_coverage.py

test-slow: $(VENV)/test $(VENV)/docs $(VENV)/built
	$(BIN)/python -m pynccl.torch build
	$(PYTEST) -m "slow and not full and not gpu"

test-full: $(VENV)/test $(VENV)/docs $(VENV)/full $(VENV)/built test-torch
	$(BIN)/python -m pytest -m "not gpu and not newest_torch"

# The torch backend with the newest torch, in an environment of its own.
test-torch:
	$(MAKE) test-newest-torch VENV=.venv-torch

test-newest-torch: $(VENV)/newest-torch $(VENV)/built
	$(BIN)/python -m pynccl.torch build
	$(PYTEST) tests/torch_backend -m "newest_torch or not (gpu or full)"

test-gpu: $(VENV)/test $(VENV)/built
	$(BIN)/python -m pytest -m gpu

# The programs of nccl-tests on the CPU library; then what compares peers in the same run.
BENCH_PROGRAMS := all_reduce all_gather broadcast reduce_scatter reduce alltoall alltoallv scatter gather sendrecv hypercube put_signal
.PHONY: $(BENCH_PROGRAMS:%=bench-%)
bench-programs: $(BENCH_PROGRAMS:%=bench-%)
$(BENCH_PROGRAMS:%=bench-%): bench-%: $(VENV)/bench $(VENV)/built
	@mkdir -p benchmarks/results/programs
	$(BIN)/pynccl bench -n 4 --cpu $* -b 8 -e 16M -f 8 --percentiles --csv benchmarks/results/programs/$*.csv

bench: bench-programs
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/matrix.py
	$(BIN)/python benchmarks/call_overhead.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/torch_all_reduce.py
	$(BIN)/python benchmarks/torch_in_flight.py
	$(BIN)/python benchmarks/one_sided.py
	$(BIN)/python benchmarks/window_memory.py

lint: $(VENV)/dev $(VENV)/test $(VENV)/built
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy
	$(BIN)/python tools/generate_api.py --check
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/dev
	$(BIN)/ruff check --fix-only $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

# The documentation as a site, in build/site.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The Python that follows from api/*.h and native/kinds.h.
generate: $(VENV)/dev
	$(BIN)/python tools/generate_api.py

# The sdist, and from it this Python's wheel for this machine's C library and newer ones. cibuildwheel builds
# those for older ones and for all versions of Python: see .github/workflows/wheels.yml.
wheel: $(VENV)/dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/check_wheel.py dist/*.whl

# The CPU library alone, without Python.
cpu-lib: $(VENV)/base
	$(CACHED) $(BIN)/python setup.py --quiet build_ext --inplace --only=pynccl.libpynccl_cpu,pynccl.forward.libnccl

clean:
	rm -rf build dist $(VENV) .venv-* *.egg-info pynccl/*.so pynccl/forward

# --- the virtual environment: one stamp per set of dependencies -------------------------------------------

PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(CACHED) $(PIP) install --no-build-isolation

$(VENV)/base:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip "setuptools>=77" "cffi>=1.17"
	touch $@

$(VENV)/built: $(VENV)/base $(SOURCES) pyproject.toml
	$(INSTALL) --editable .
	touch $@

# This builds too; targets name `built` after it, so that later changes of the sources build only.
$(VENV)/demo $(VENV)/test $(VENV)/test-core $(VENV)/newest-torch $(VENV)/full $(VENV)/dev $(VENV)/docs $(VENV)/bench: $(VENV)/%: $(VENV)/base pyproject.toml
	$(INSTALL) --editable ".[$*]"
	touch $@ $(VENV)/built

# --- tests/cpp: the CPU library's sources and each test program, plain and under the sanitizers -------------

SANITIZERS := plain asan tsan
plain_FLAGS := -O1
# In C an enum holds any int, and the library is what checks them. The check of vptr needs descriptors, which some
# tests use up. -O1 would double the time of compilation.
asan_FLAGS := -Og -fsanitize=address,undefined -fno-sanitize=enum,vptr -fno-sanitize-recover=all
tsan_FLAGS := -O1 -fsanitize=thread
# ThreadSanitizer needs addresses where it expects them, and forked ranks that start threads of their own; what
# it reports in a child that leaves by _exit counts only if it halts there. ThreadSanitizer
# of GCC 12 tells threads apart by their addresses, also after a fork: a child must not get the address of a parent's
# thread for a new one, so glibc keeps the parent's stacks mapped.
tsan_RUN := TSAN_OPTIONS=die_after_fork=0:halt_on_error=1 GLIBC_TUNABLES=glibc.pthread.stack_cache_size=0x40000000 \
	setarch $(shell uname -m) -R
CXX_TESTS := $(basename $(notdir $(wildcard tests/cpp/test_*.cpp)))
SANITIZE_FLAGS := -std=c++17 -g1 -Ipynccl -Ipynccl/cpu -fno-omit-frame-pointer -ffp-contract=off -pthread -Wall -Wextra -Werror -MMD -MP

DOCTEST := /usr/include/doctest/doctest.h
$(DOCTEST):
	@echo "tests/cpp needs $@, which is not there: install doctest 2.4 (Debian and Ubuntu: apt-get install doctest-dev)"; exit 1

sanitize: $(foreach s,$(SANITIZERS),$(CXX_TESTS:%=run-$(s)-%))

define sanitizer
build/$(1)/%.o: pynccl/cpu/%.cpp
	@mkdir -p $$(@D)
	$$(CXX) $$(SANITIZE_FLAGS) $$($(1)_FLAGS) -c $$< -o $$@

build/$(1)/%.o: tests/cpp/%.cpp | $(DOCTEST)
	@mkdir -p $$(@D)
	$$(CXX) $$(SANITIZE_FLAGS) $$($(1)_FLAGS) -c $$< -o $$@

build/$(1)/%: build/$(1)/%.o build/$(1)/main.o $(CPU:pynccl/cpu/%.cpp=build/$(1)/%.o)
	$$(CXX) $$($(1)_FLAGS) -pthread $$^ -o $$@

.PRECIOUS: build/$(1)/%.o
-include $$(wildcard build/$(1)/*.d build/$(1)/*/*.d)
endef
$(foreach s,$(SANITIZERS),$(eval $(call sanitizer,$(s))))

define sanitized_run
.PHONY: run-$(1)-$(2)
run-$(1)-$(2): build/$(1)/$(2)
	$$($(1)_RUN) timeout 600 ./build/$(1)/$(2)
endef
$(foreach s,$(SANITIZERS),$(foreach t,$(CXX_TESTS),$(eval $(call sanitized_run,$(s),$(t)))))
