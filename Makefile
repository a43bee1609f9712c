PYTHON ?= python3
comma := ,
BIN := .venv/bin
# More of autopar's extras, as in EXTRAS=,gpu-compiler; the environment is made ready again for them.
EXTRAS ?=
READY := .venv/.ready$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help train test processes kills lint types wheel docs versions

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

train: $(READY) ## plan and train the GPT benchmark; ARGS= passes options on
	$(BIN)/python -m benchmarks.gpt $(ARGS)

test: $(READY) ## run the tests; ARGS= passes options on, as in ARGS="-m slow"
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

processes: $(READY) ## train on several processes: equal to jit
	$(BIN)/python -m pytest -m slow -k sample tests/autopar/distributed/test_processes.py

kills: $(READY) ## a training of two processes that is killed, stopped or cut off ten times; minutes
	$(BIN)/python -m benchmarks.kills --runs 1 --kills 10 --steps 120 --every 1 --lost-seconds 4 --seed 44

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## check types
	$(BIN)/basedpyright

wheel: $(READY) ## build the source distribution, and from it the wheel, into dist
	$(BIN)/python -m build --no-isolation --outdir dist

docs: ## build the documentation as a site, into site
	@$(MAKE) --no-print-directory EXTRAS=$(EXTRAS),docs .venv/.ready$(subst $(comma),-,$(EXTRAS)$(comma)docs)
	$(BIN)/python -m mkdocs build --strict --site-dir site

versions: ## publish this version's documentation beside earlier ones, on branch gh-pages; ARGS=--push sends it
	@$(MAKE) --no-print-directory EXTRAS=$(EXTRAS),docs .venv/.ready$(subst $(comma),-,$(EXTRAS)$(comma)docs)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike deploy --update-aliases $(ARGS) "$$($(BIN)/python -m autopar --version | cut -d' ' -f2)" latest
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike set-default $(ARGS) latest

# pip is the last thing a new environment gets: without it, an earlier attempt was cut short.
$(READY): pyproject.toml
	@test -x $(BIN)/pip || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'autopar needs Python 3.11 or newer, which "$(PYTHON)" is not; name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }; \
	  $(PYTHON) -m venv .venv; }
	@echo 'Installing into .venv (minutes the first time)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev$(EXTRAS)]'
	@touch $@
