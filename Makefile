# Every target sets itself up: a virtual environment in .venv with torch, the build tools and the package.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
BUILT_FROM := setup.py pyproject.toml $(shell find csrc python -name '*.pyc' -prune -o -type f -print)

.PHONY: demo test bench lint ctest clean

demo: $(VENV)/installed
	$(BIN)/mla-prefill demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks cpu

# The C++ that needs no torch: planner, CPU kernel, context path.
ctest: $(VENV)/tools
	$(BIN)/cmake -S . -B build/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/cmake
	$(BIN)/ctest --test-dir build/cmake --output-on-failure

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*' 'tests/cpp/*' | xargs $(BIN)/clang-format --dry-run --Werror
	@# Nothing below csrc/ops includes torch.
	! grep -rnE '#include *<(torch|ATen|c10)/' csrc --exclude-dir=ops

$(VENV)/tools:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "setuptools>=68" wheel ninja cmake pybind11
	touch $@

$(VENV)/installed: $(VENV)/tools $(BUILT_FROM)
	$(PIP) install $(TORCH) numpy
	$(PIP) install --no-build-isolation ".[test]"
	touch $@

$(VENV)/lint: $(VENV)/tools
	$(PIP) install ruff==0.17.6 clang-format==23.1.5
	touch $@

clean:
	rm -rf build $(VENV)
