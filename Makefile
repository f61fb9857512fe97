# Targets for people and for CI. Override PYTHON (the interpreter to start from) and VENV (where the environment goes).
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= onnx,qnn,export,train,server,dev
BIN := $(VENV)/bin
MODEL := smollm2-135m
PROMPT := Write a short story about a fox who learns to swim.
PYTEST_ARGS ?=
# Packages that cannot be beside the others (another onnxruntime, another transformers) have environments of their own.
VENV_OPENVINO ?= .venv-openvino
VENV_WEBGPU ?= .venv-webgpu
VENV_OPTIMUM ?= .venv-optimum
TEST_TOOLS := pytest pytest-timeout pytest-randomly hypothesis onnx safetensors gguf
# llama.cpp is compiled once a machine (.ci/llamacpp.py keeps the wheel); `no` leaves it and its tests out.
LLAMACPP ?= yes

.PHONY: help venv llamacpp model demo test test-all test-openvino test-webgpu test-optimum check format bench bench-setup bench-quick clean

help:
	@echo "make demo   fetch $(MODEL), convert it, and compare plain with speculative decoding"
	@echo "make test   all tests, the ones on the real model included"
	@echo "make test-openvino  test-webgpu  test-optimum   tests that need an environment of their own"
	@echo "make test-all  test and these three"
	@echo "make check  formatting, lints and types"
	@echo "make bench-setup  other engines and the synthetic target that measurements compare with (some 4 GB)"
	@echo "make bench-quick  the targets on this machine in a quarter of an hour; the last line is JSON"
	@echo "make bench  everything: all prompts, all engines (hours)"
	@echo "make format reformat and fix what can be fixed"
	@echo "make clean  remove the environment and caches inside this folder (not the user's model cache)"

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

llamacpp: venv
	$(BIN)/python .ci/llamacpp.py

model: venv
	$(BIN)/edgespec pull $(MODEL)

demo: model
	$(BIN)/edgespec run --compare -m $(MODEL) -n 128 --temp 0 "$(PROMPT)"

test: model $(if $(filter-out no,$(LLAMACPP)),llamacpp)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# $(1) environment, $(2) constraints, $(3) packages, $(4) extras of edgespec
define own_venv
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) -e '.$(4)' $(3)
endef

$(VENV_OPENVINO)/.stamp: pyproject.toml constraints.txt tests/openvino/constraints.txt
	$(call own_venv,$(VENV_OPENVINO),-c constraints.txt -c tests/openvino/constraints.txt,onnxruntime-openvino $(TEST_TOOLS))
	@touch $@

test-openvino: $(VENV_OPENVINO)/.stamp
	$(VENV_OPENVINO)/bin/python -m pytest $(PYTEST_ARGS) --device openvino:cpu tests/openvino tests/contract/test_session_contract.py

$(VENV_WEBGPU)/.stamp: pyproject.toml constraints.txt tests/webgpu/constraints.txt tests/webgpu/software_gpu.sh
	$(call own_venv,$(VENV_WEBGPU),-c constraints.txt -c tests/webgpu/constraints.txt,onnxruntime-webgpu $(TEST_TOOLS))
	sh tests/webgpu/software_gpu.sh $(VENV_WEBGPU)/gpu
	@touch $@

test-webgpu: $(VENV_WEBGPU)/.stamp
	. $(VENV_WEBGPU)/gpu/environment && $(VENV_WEBGPU)/bin/python -m pytest $(PYTEST_ARGS) --device webgpu tests/webgpu tests/contract/test_session_contract.py

$(VENV_OPTIMUM)/.stamp: pyproject.toml tests/optimum/constraints.txt
	$(call own_venv,$(VENV_OPTIMUM),-c tests/optimum/constraints.txt,$(TEST_TOOLS),[optimum])
	@touch $@

test-optimum: $(VENV_OPTIMUM)/.stamp
	$(VENV_OPTIMUM)/bin/python -m pytest $(PYTEST_ARGS) tests/optimum

test-all: test test-openvino test-webgpu test-optimum

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m edgespec_bench readme --check

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Environments and models of the other engines (some 4 GB) and the synthetic target; what is there is left alone.
bench-setup: model
	$(BIN)/python -m edgespec_bench peers --setup
	$(BIN)/edgespec info $(MODEL)-x3 >/dev/null 2>&1 || $(BIN)/python -m edgespec_bench widen --factor 3

bench-quick: model
	$(BIN)/python -m edgespec_bench quick

bench: bench-setup
	$(BIN)/python -m edgespec_bench full

clean:
	rm -rf $(VENV) $(VENV_OPENVINO) $(VENV_WEBGPU) $(VENV_OPTIMUM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
