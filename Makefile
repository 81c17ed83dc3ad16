# Every target sets up what it needs: `.venv` is built on first use and again only after the requirements changed.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCS := $(VENV)/.installed-docs
# An environment of its own, because a wheel is made without torch and all that tests need.
PACKAGE := $(VENV)/only-package
PYTEST := $(RUN) -m pytest
# In a folder of its own, because every process that imports PEFT imports what it finds of it.
BITSANDBYTES := $(VENV)/only-bitsandbytes
# An environment above this one, with newer releases of what is pinned.
NEWEST := $(VENV)/newest

# Where the environment forbids it, every process of the tests compiles all it imports again: a third
# of collecting them, and seconds of each process that a test starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help quickstart notebooks test test-slow test-newest test-gpu lint docs wheel shape format clean

help:
	@echo 'make quickstart   fine-tune a small language model (DEVICES=3 for three virtual devices)'
	@echo 'make notebooks    run the notebooks and store what they print (NOTEBOOKS=... for some of them)'
	@echo 'make test         the tests (TESTS=tests/plan for a part of them)'
	@echo 'make test-slow    the tests that take minutes'
	@echo 'make test-newest  tests with the newest releases, such as those of transformers'
	@echo 'make test-gpu     the tests that need an accelerator'
	@echo 'make lint         ruff and mypy'
	@echo 'make docs         the documentation as a site, in build/site; fails at any warning'
	@echo 'make wheel        the wheel and the sdist, in dist'
	@echo 'make shape        how long, branched and wide the sources are, beside the targets'
	@echo 'make format       let ruff rewrite what it can'
	@echo 'make clean        remove .venv and caches'

quickstart: $(INSTALLED)
	$(RUN) examples/quickstart.py $(if $(DEVICES),--devices $(DEVICES))

notebooks: $(INSTALLED)
	$(RUN) notebooks/run.py $(NOTEBOOKS)

test: $(INSTALLED)
	$(PYTEST) -n auto --dist worksteal -m 'not slow and not gpu and not bitsandbytes' $(TESTS)

test-slow: $(INSTALLED) $(BITSANDBYTES)
	$(PYTEST) -n auto --dist worksteal -m 'slow and not gpu and not bitsandbytes' $(TESTS)
	PYTHONPATH=$(CURDIR)/$(BITSANDBYTES) $(PYTEST) -n auto --dist worksteal -m 'bitsandbytes and not gpu' tests/quantized tests/hf/quantization
	@# As on another CPU, whose sums round otherwise.
	ATEN_CPU_CAPABILITY=default $(PYTEST) -n auto --dist worksteal -m 'not slow and not gpu and not bitsandbytes' tests/presets tests/kernels

test-newest: $(INSTALLED)
	$(RUN) tools/newest.py $(NEWEST)
	$(NEWEST)/bin/python -m pytest -n auto --dist worksteal -m 'not slow and not gpu and not bitsandbytes' $(or $(TESTS),tests/hf tests/presets)

test-gpu: $(INSTALLED)
	$(PYTEST) -m gpu $(TESTS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

wheel: $(PACKAGE)
	$(PACKAGE)/bin/python tools/package.py

shape: $(INSTALLED)
	$(RUN) tools/shape.py

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(BITSANDBYTES): $(INSTALLED)
	$(RUN) -m pip install --quiet --no-deps -c constraints.txt --target $@ bitsandbytes
	@touch $@

$(DOCS): $(INSTALLED)
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

$(PACKAGE): constraints.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet -c constraints.txt build ziglang
	@touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed, this is %s; try make PYTHON=python3.12" % sys.version.split()[0])'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
