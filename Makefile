# `make help` lists the commands. They use the environment .venv, which the first command builds.
# PYTHON selects the interpreter for it: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment in which `make test-wheel` tests the wheel.
TRIED := build/wheel
# The environment of `make test-next`, and what is installed over the package's own requirements.
NEXT := build/next
WITH ?= --pre tensorflow keras
# The markers of tests that need other packages, a browser, a device, the internet, or many minutes.
OPTIONAL := slow or torch or jax or peers or browser or gpu or arm or real
# The number of test processes. Each needs about 3 GB. A process that has no more tests takes some of another's.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Only packages of .venv are used, none of the user or the machine.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-full test-extra test-browser test-arm test-real test-network test-packaging test-wheel test-next lint format docs wheel bench bench-gpu clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.with-demo ## a tour, offline: load, classify, resize, fine-tune, export, compare
	$(BIN)/keras-vit demo

test: $(VENV)/.with-test ## the tests: every part, format, family, mode and command at least once
	$(PYTEST) -m "not (full or $(OPTIONAL) or network)"

test-full: $(VENV)/.with-test ## further cases of the same: all guides, reference files, kills, workers
	$(PYTEST) -m "full and not ($(OPTIONAL) or network)"

test-extra: $(VENV)/.with-test $(VENV)/.with-test-extra ## the optional tests: PyTorch, JAX, GPU, installing, other ViT packages if installed
	$(BIN)/python -m pytest -m "($(OPTIONAL)) and not network and not browser and not arm and not real"

test-browser: $(VENV)/.with-test ## browser example in headless Chromium (needs npm and chromium)
	npm ci --prefix examples/browser --no-audit --no-fund
	$(BIN)/python -m pytest -s -m browser tests/export/test_browser.py

test-arm: $(VENV)/.with-test ## exported files in LiteRT on an emulated ARM64 processor (needs Debian's apt-get)
	$(BIN)/python -m pytest -rs -s -m arm tests/export/test_litert_runtimes.py

test-real: $(VENV)/.with-test $(VENV)/.with-test-real ## a trained model and every quantization mode (downloads 90 MB once)
	$(BIN)/python -m pytest -rs -m real tests/export/test_real_weights.py

test-network: $(VENV)/.with-test $(VENV)/.with-hf ## the tests that download from the internet
	$(BIN)/python -m pytest -m network

test-packaging: $(VENV)/.with-test ## test wheel, sdist, folder and editable installs (minutes)
	$(BIN)/python -m pytest tests/test_packaging.py

test-wheel: wheel ## run README's first lines in an environment with only the wheel
	$(PYTHON) -m venv --clear $(TRIED)
	$(TRIED)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[demo]"
	$(BIN)/python tests/support/doc_blocks.py > $(TRIED)/lines.py
	cd $(TRIED) && KERAS_VIT_OFFLINE=1 bin/python -I lines.py

test-next: ## make test's tests with the newest TensorFlow and Keras, candidates too; others: WITH="tensorflow==2.20.* keras==3.14.*"
	$(PYTHON) -m venv --clear $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" $(WITH)
	$(NEXT)/bin/python -m pip list --disable-pip-version-check | grep -E "^(tensorflow|keras|numpy|tokenizers|ai-edge|litert)"
	$(NEXT)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not (full or $(OPTIONAL) or network)"

lint: $(VENV)/.with-lint ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.with-lint ## format all files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.with-docs ## write the API reference to build/api/
	$(BIN)/python docs/reference.py build/api

wheel: $(VENV)/.with-test ## build the wheel and the sdist in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

bench: $(VENV)/.with-test ## run the benchmarks, with the other packages that are installed
	@for script in $(filter-out %compare.py %edge_peers.py %edge_report.py %few_photos.py %real_weights.py %real_weights_peers.py %embed_peers.py %accelerators.py %gpu.py %samples.py %subject_masks.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

bench-gpu: $(VENV)/.with-test ## on a GPU, in 8 minutes: training steps, replicas, memory, SavedModel; writes benchmarks/results/gpu.txt
	$(BIN)/python benchmarks/gpu.py

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp file per extra: packages are installed once, and again when the dependencies have changed.
$(VENV)/.with-%: $(VENV)/.made setup.cfg setup.py pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		echo "keras_vit needs Python 3.11, 3.12 or 3.13 (TensorFlow has no other), and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>/dev/null || echo not installed). Choose another: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
