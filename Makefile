# Needs Python 3.10 or newer and make. Everything is installed into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := tests/constraints.txt
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' $(CONSTRAINTS))
# bf16_autoload.py is copied by the editable install, so a change to it means a new install.
STAMP := $(VENV)/.installed
INPUTS := pyproject.toml $(CONSTRAINTS) kernels/bf16_autoload.py
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
COMPAT_ARGS ?=

# Python compiles what is imported, when it is. pip would compile all of 19,000 files, one by one, for
# as long as it takes to fetch them.
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

# Tests start hundreds of processes. Where this is set, each of them compiles every module anew.
export PYTHONDONTWRITEBYTECODE :=

# Sphinx and its kin come on top, so that nobody installs them to run the tests.
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: demo test lint bench gpu docs notebooks compat install clean

demo: $(STAMP)
	$(BIN)/python examples/lightning_demo.py $(DEMO_ARGS)

# On two cores two processes leave a third of the time unused: many tests wait for other processes.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/python -m torch_bf16 bench $(BENCH_ARGS)

gpu: $(STAMP)
	$(BIN)/python examples/gpu_record.py $(GPU_ARGS)

docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -c docs . build/docs
	@echo "build/docs/index.html"

notebooks: $(STAMP)
	$(BIN)/python examples/notebooks/make_notebooks.py

compat: $(STAMP)
	$(BIN)/python tests/proofs/compat.py $(COMPAT_ARGS)

install: $(STAMP)

# torch goes first and by its plain name, so that the index chooses the build that suits the machine.
$(STAMP): $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) -c $(CONSTRAINTS) -e ".[all,dev]"
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
