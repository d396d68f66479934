# Everything needed from a fresh clone: `make demo`, `make test`, `make check`, `make bench`.
#
# TORCH names the build to install; PIP_ARGS goes to pip for torch alone, for example the
# --index-url of CPU wheels where the default index would bring a CUDA build.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_ARGS ?=
EXTRAS ?= dev,report,gpu
PYTEST_ARGS ?=
SGLANG_VERSIONS ?= 0.5.17 0.5.23
ADAPTER_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# What an environment was made of is worth keeping for the next run.
.SECONDARY: $(SGLANG_VERSIONS:%=.venv-sglang-%/.installed)
.DEFAULT_GOAL := help
.PHONY: help setup demo test adapter check format config bench clean

help:
	@echo 'make demo     set up, replay the embedded trace through every arm, write out/demo.html'
	@echo 'make test     set up, run all tests, those of the adapter too'
	@echo 'make adapter  set up an environment for each SGLang version, test the plugin there'
	@echo 'make check    set up, then format, lint, types and tests'
	@echo 'make bench    set up, run the benchmarks'
	@echo 'make format   rewrite the sources in the project format'
	@echo 'make config   rewrite config.yaml from the settings in the code'
	@echo 'make clean    remove the environment and what was built'

setup: $(INSTALLED)

# Torch comes first: what follows then finds it there and never looks for another build.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_ARGS) '$(TORCH)'
	$(PIP) install --editable '.[$(EXTRAS)]'
	touch $@

demo: setup
	mkdir -p out
	$(BIN)/kvdefrag simulate --html out/demo.html --json out/demo.json

# Each version of SGLang needs an environment of its own, with the exact versions of what it
# imports. Nothing there is resolved: SGLang's own requirements name CUDA builds.
.venv-sglang-%/.installed: tests/adapter/requirements-%.txt pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --no-deps $(PIP_ARGS) '$(TORCH)'
	$(@D)/bin/python -m pip --disable-pip-version-check install --no-deps --requirement $<
	$(@D)/bin/python -m pip --disable-pip-version-check install --no-deps --editable .
	touch $@

adapter-%: .venv-sglang-%/.installed
	.venv-sglang-$*/bin/python -m pytest tests/adapter $(ADAPTER_ARGS)

adapter: $(SGLANG_VERSIONS:%=adapter-%)

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	$(MAKE) adapter

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

config: setup
	$(BIN)/python -c 'from kvdefrag.config import default_file; print(default_file(), end="")' > config.yaml

bench: setup
	$(BIN)/python bench/run.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venv-sglang-* out build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
