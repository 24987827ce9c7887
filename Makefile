# The environment lives in .venv. `make install` installs the package and what it needs, which is
# enough for the demo; tests, linters and benchmarks need `make install-dev`. Every target installs
# what it needs first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# Quietens a remark of mkdocs-material about the next version of mkdocs.
export NO_MKDOCS_2_WARNING := 1

.PHONY: install install-dev demo docs test lowest torture bench quick lint browser web container-check \
  release-check clean

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): about a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@
	@echo "Installed. Activate with: source $(VENV)/bin/activate"

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what tests, linters and benchmarks need: about a minute"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/solodg demo

# The documentation as a site in site/, which opens from disk. A broken link, a missing anchor or a
# missing docstring ends it with an error.
docs: install-dev
	$(BIN)/python -m mkdocs build --strict

# Two processes of one thread each are faster on two cores than one process of two threads.
test: install-dev lint browser web
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The lower bounds of pyproject.toml, installed in a fresh environment, and the tests that meet each
# of these packages in a few minutes. LOWEST replaces bounds that cannot be had here, e.g.
# make lowest LOWEST="torch==2.13.0 torchvision==0.28.0": on Linux, PyPI's torch brings CUDA, several GB.
LOWEST ?=
LOWEST_VENV := .venv-lowest
LOWEST_TESTS := $(addprefix tests/test_,backbones cli config_options decode dicom estimator figures hub \
  in_memory loggers onnx plan plan_table predictor resampling rotated serving storage stream verify)
LOWEST_EXTRAS := ray,onnx,serve,tensorboard,wandb,mlflow,parquet,hub,medical

lowest:
	@echo "Installing the lowest versions into $(LOWEST_VENV): several minutes"
	@rm -rf $(LOWEST_VENV)
	@$(PYTHON) -m venv $(LOWEST_VENV)
	@$(LOWEST_VENV)/bin/python tools/lowest.py $(LOWEST) > $(LOWEST_VENV)/lowest.txt
	@$(LOWEST_VENV)/bin/python -m pip install --quiet --constraint $(LOWEST_VENV)/lowest.txt \
	  --editable '.[$(LOWEST_EXTRAS)]' pytest pytest-timeout pytest-xdist hypothesis httpx datasets pandas
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest -n 2 --dist loadfile \
	  $(addsuffix .py,$(LOWEST_TESTS))

# For the tests that open pages: Chromium, where apt may install it. Without it they skip.
browser:
	@if ! { command -v chromium && command -v chromedriver; } >/dev/null && \
	  command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "Installing chromium for the tests of pages"; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium \
	    chromium-driver; } >/dev/null 2>&1 || echo "No chromium: the tests of pages will skip"; \
	fi

# For the tests of `export --web`: ONNX Runtime Web, where npm is. Without it they skip.
ORT_WEB := onnxruntime-web@1.30.0

web: install-dev
	@if command -v npm >/dev/null && \
	  ! grep -qs '"version": "$(lastword $(subst @, ,$(ORT_WEB)))"' \
	    $(VENV)/npm/node_modules/onnxruntime-web/package.json; then \
	  echo "Installing $(ORT_WEB) for the tests of pages"; mkdir -p $(VENV)/npm; \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/npm $(ORT_WEB) || \
	  echo "No ONNX Runtime Web: its tests will skip"; \
	fi

# The steps of the Dockerfile in a fresh environment, and a model served from it: minutes.
container-check: install-dev
	$(BIN)/python tools/container_check.py

# The packages as they are published: built, checked, installed with their dependencies in a fresh
# environment and tried outside the checkout. Minutes, and the size of torch.
RELEASE_VENV := .venv-release

release-check:
	@rm -rf $(RELEASE_VENV) dist && $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet build twine
	$(RELEASE_VENV)/bin/python -m build
	$(RELEASE_VENV)/bin/twine check --strict dist/*
	$(RELEASE_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
	  "$$(ls dist/*.whl)[onnx]"
	$(RELEASE_VENV)/bin/python tools/smoke.py

# Kills, damaged files, full disks and hostile requests: docs/reliability.md. `make torture PART=kills`
# runs one part of it; WRITE=docs/reliability.md puts the figures into the page.
SEED ?= 0

torture: install-dev
	$(BIN)/python -m torture $(PART) --seed $(SEED) $(if $(COUNT),--count $(COUNT)) \
	  $(if $(WRITE),--write $(WRITE))

# Where PACS and weights for it lie, for the rows that need them.
DATA ?= data
WEIGHTS ?= tf_efficientnet_lite0.safetensors

bench: install-dev
	$(BIN)/python -m benchmarks.default $(DATA) $(WEIGHTS)
	$(BIN)/python -m benchmarks.head
	$(BIN)/python -m benchmarks.model
	$(BIN)/python -m benchmarks.methods
	$(BIN)/python -m benchmarks.compiled
	$(BIN)/python -m benchmarks.onnx
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.loader $(DATA)
	$(BIN)/python -m benchmarks.large_data
	$(BIN)/python -m benchmarks.frozen_pacs $(DATA) $(WEIGHTS)
	$(BIN)/python -m benchmarks.estimator_pacs $(DATA) $(WEIGHTS)

# Every quick twin of a table of the paper; killed, it goes on where it stopped.
quick: install
	failed=0; for plan in configs/quick/*.yaml; do \
	  $(BIN)/solodg bench $$plan --data-dir $(DATA) || failed=1; \
	done; exit $$failed

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(LOWEST_VENV) $(RELEASE_VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache \
	  .ruff_cache .hypothesis
