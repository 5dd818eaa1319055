# make demo, make test: both do all the set-up a fresh machine needs (Python 3.11 or newer and make).
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-all fuzz lint types catalogue texts docs bench format clean

demo: $(VENV)/.core
	$(VENV)/bin/fedfuse demo

test: lint types
	$(PY) -m pytest -n 2 --dist worksteal

test-all: $(VENV)/.dev
	$(PY) -m pytest -n 2 --dist worksteal -m "(paper or browser or slow) and not flower"
	$(PY) -m pytest -m flower  # each starts processes and ports of its own: one at a time

fuzz: $(VENV)/.dev
	$(PY) tests/door/fuzz.py --count $(or $(COUNT),1000000)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.dev
	$(VENV)/bin/mypy

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

catalogue: $(VENV)/.dev
	$(PY) -c "from fedfuse.core.catalogue import write_catalogue; write_catalogue()"
	$(PY) tests/test_documents.py

texts: $(VENV)/.dev
	$(PY) tests/test_texts.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "open build/site/index.html"

BENCHES := "train.py --quick" "whole_run.py --turns 1" "mean.py --small" fedlpa.py bayes.py match.py swa.py scale.py door.py flower.py fuse_files.py \
	"influence.py --guards none" merge.py mixture.py moments.py prune.py stream.py

bench: $(VENV)/.dev
	for run in $(BENCHES); do echo "== $$run"; $(PY) benchmarks/$$run || exit 1; done

$(VENV)/.core: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PIP) pip setuptools
	$(PIP) --no-build-isolation -e '.[fast]'
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --no-build-isolation -e '.[dev,docs,export,fast,flower,loggers,match,tables,transformers]'
	touch $@

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
