# `make` lists the targets. Each one that runs code makes .venv first (a minute or two once, nothing afterwards).
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help chat watch tutorial test test-all property break lint clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gguf,triton,dev]'
	@touch $@

chat: $(READY)  ## talk to the model in this terminal
	@$(PY) -m minipaged.chat $(ARGS)

watch: $(READY)  ## see requests at work, step by step (ARGS=--list: the scenes)
	@$(PY) -m minipaged.watch $(ARGS)

tutorial: $(READY)  ## step through a tutorial: the first, or make tutorial ARGS=4
	@$(PY) -m minipaged.tutorial $(or $(ARGS),1)

test: $(READY)  ## the tests, fast settings
	$(PY) -m pytest $(ARGS)

test-all: $(READY)  ## thousands of examples and the slow matrices
	$(PY) -m pytest --all $(ARGS)

property: $(READY)  ## the property-based tests alone
	$(PY) -m pytest tests/property $(ARGS)

break: $(READY)  ## break a rule in a copy and see which test names it (ARGS=NAME)
	@$(PY) -m tests.breaks $(ARGS)

lint: $(READY)  ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache build *.egg-info
