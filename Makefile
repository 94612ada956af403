# Every target works alone on a fresh machine: it makes its own environment first.
PYTHON ?= python3
VENV   ?= .venv
# Pinned, and installed first: of this version pip prefers a CPU build where the package index has one, and CUDA
# packages are not needed here. To name such an index: make test TORCH='torch==2.13.0 --index-url URL'
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A process a core, each with one thread; a file's tests stay together, since they share what they export.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile
DEMO   := out/tiny

.DEFAULT_GOAL := help
.PHONY: help demo test test-weekly families lint typing-tree clean

help:
	@echo "make demo         export, compare, build and run the bundled model"
	@echo "make test         lint, types, import rules, and every quick test"
	@echo "make test-weekly  the same with the slow tests"
	@echo "make families     the tests of every model family, slow ones too, and the README's table of what they found"
	@echo "make lint         lint, types and import rules alone"
	@echo "make clean        remove everything that these targets made"

demo: $(READY)
	@echo "# 1. Trace the checkpoint: prefill.onnx, decode.onnx and their one weights file."
	$(BIN)/kvgraph export tests/tiny_model/model -o $(DEMO) --force
	@echo "# 2. Does ONNX Runtime compute what PyTorch computes, at every step?"
	$(BIN)/kvgraph compare $(DEMO) --checkpoint tests/tiny_model/model
	@echo "# 3. Build a TensorRT-RTX engine for SM89 from the same two files; this needs no GPU."
	$(BIN)/kvgraph build $(DEMO) --target tensorrt-rtx --compute-capability 89
	@echo "# 4. Write."
	$(BIN)/kvgraph run $(DEMO) --prompt 'Once upon a time'

test: lint
	$(PYTEST) -m 'not slow'

test-weekly: lint
	$(PYTEST)

families: $(READY)
	$(PYTEST) tests/export/families --families-table README.md

# import-linter reads folders, not installed packages, so it too looks at the tree of links.
lint: $(READY) typing-tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .typing/kvgraph
	cd .typing && $(abspath $(BIN))/lint-imports --no-logo ../pyproject.toml

# The packages as they are imported, kvgraph.models and so on: what tools see that cannot follow the editable
# install, which maps the folders at the top.
typing-tree:
	@mkdir -p .typing/kvgraph
	@find .typing/kvgraph -type l ! -exec test -e {} ';' -exec rm {} ';'
	@for path in kvgraph/* models export quant runtime; do ln -sfn "../../$$path" .typing/kvgraph/; done

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvgraph needs Python 3.11; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[export,cpu,rtx,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .typing out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
