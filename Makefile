# Each command first installs what it needs into .venv, again only when requirements or kernels have changed.
# Needs Python >= 3.11 with its venv module, a C++ compiler and the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := CMakeLists.txt $(wildcard src/warmattn/backend/cpu/native/*)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --build-constraint constraints.txt

.PHONY: demo test outside compile-all compile-newer sanitize neon wheel check docs bench clean

demo: $(VENV)/.package
	$(BIN)/warmattn demo

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# Transformers' own model tests, on our attention and on stock "sdpa".
outside: $(VENV)/.outside
	OMP_NUM_THREADS=1 $(BIN)/python scripts/test_transformers_suite.py

# The kernels for GPUs, all of them, without a GPU.
compile-all: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/cuda/attend_cases.py

# A few of them, with the newest Triton that is supported.
compile-newer: $(VENV)/triton-newer/triton
	PYTHONPATH=$(VENV)/triton-newer OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/cuda/test_portable.py

# The CPU kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON=$(BIN)/python scripts/test_sanitized.sh

# The CPU kernels for AArch64 in an emulator. It and the cross compiler are not Python's: on Debian,
# apt-get install g++-aarch64-linux-gnu qemu-user.
neon: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON=$(BIN)/python scripts/test_neon.sh

# The sdist and the wheel, into dist/, once they pass in a new environment without a compiler.
wheel: $(VENV)/.wheel
	PYTHON=$(BIN)/python scripts/check_wheel.sh dist

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.package
	set -e; for script in benchmarks/[!_]*.py; do $(BIN)/python $$script --json; done

clean:
	rm -rf $(VENV) build dist site demo-out

$(VENV)/.pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "warmattn needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.3'
	touch $@

# torch comes first and alone, pinned: nothing that depends on it can then bring another build along.
$(VENV)/.torch: $(VENV)/.pip constraints.txt
	$(INSTALL) torch
	touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml $(KERNELS)
	$(INSTALL) --editable '.[hf,plot]'
	touch $@

$(VENV)/.test: $(VENV)/.package
	$(INSTALL) --group test --group oracle
	touch $@

$(VENV)/.outside: $(VENV)/.package
	$(INSTALL) --group outside
	touch $@

$(VENV)/triton-newer/triton: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(dir $@) triton==3.7.1

$(VENV)/.dev: $(VENV)/.test
	$(INSTALL) --group dev
	touch $@

$(VENV)/.wheel: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --group wheel
	touch $@

$(VENV)/.docs: $(VENV)/.package
	$(INSTALL) --group docs
	touch $@
