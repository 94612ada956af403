# Every target works alone on a fresh machine: it makes its own environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test test-weekly lint clean

help:
	@echo "make demo         export, compare, build and run the bundled model"
	@echo "make test         checks and every test that needs no GPU"
	@echo "make test-weekly  the slow tests too"

# torch is pinned here, to a CPU build, so that no CUDA packages are pulled in; pyproject.toml admits it.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[export,cpu,rtx,dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .typing out build dist *.egg-info
