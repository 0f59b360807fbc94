# The two commands that matter: `make test` and `make book`. Each sets up
# everything it needs in .venv, from a bare clone and Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PY := $(VENV)/bin/python
NB ?=
NBS := $(if $(NB),$(wildcard $(foreach n,$(NB),nbs/$(n).ipynb nbs/$(n)_*.ipynb)),$(sort $(wildcard nbs/*.ipynb)))
RECORD ?= _proc/status.json
PORT ?= 8000
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	--nbval --nbval-current-env \
	--nbval-sanitize-with tests/sanitize.cfg --record $(RECORD)
# one thread a process: two notebooks run side by side on two cores
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# what one of many processes has compiled, the others need not
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lint test book serve notebooks records bench verify status owner clean

help:  ## what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-12s%s\n", $$1, $$2}' Makefile

$(VENV)/.done: requirements.txt setup.py settings.ini
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit(f"needs Python 3.11, found {v[0]}.{v[1]}: make … PYTHON=/path/to/python3.11")'
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

setup: $(VENV)/.done  ## .venv with pinned packages and the package itself

lint: $(VENV)/.done  ## what tools find in code and spelling, without running any of it
	$(VENV)/bin/ruff check --no-cache --output-format concise
	$(PY) .ci/one_assignment.py
	$(VENV)/bin/codespell

test: $(VENV)/.done  ## every notebook under nbval, every test under pytest
	$(PYTEST) nbs tests

book: $(VENV)/.done  ## the site, in _book/_build/html; warnings are fatal
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/jupyter-book build . --path-output _book -W -n --keep-going

serve: book  ## build the site and open it
	@echo "http://127.0.0.1:$(PORT)/"
	@(sleep 1; $(PY) -m webbrowser "http://127.0.0.1:$(PORT)/") & \
	$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory _book/_build/html

notebooks: $(VENV)/.done  ## export, run, store outputs, clean: all, or NB="01 A2"
	@test -n "$(NBS)" || { echo "no notebook in nbs/ begins with: $(NB)"; exit 2; }
	$(VENV)/bin/nbdev_export
	OMP_NUM_THREADS=2 $(VENV)/bin/jupyter execute --inplace $(NBS)
	$(VENV)/bin/nbdev_clean

records: $(VENV)/.done  ## run the recorded experiments again
	@for f in $(filter-out experiments/common.py,$(wildcard experiments/*.py)); do echo "$$f"; OMP_NUM_THREADS=2 $(PY) $$f || exit 1; done

bench: $(VENV)/.done  ## ratios against the named peers, as tables
	@for f in tests/bench/bench_*.py; do echo "$$f"; $(PY) $$f || exit 1; done

verify: $(VENV)/.done  ## see each claim of the book turn red: all, or NB="01 07"
	$(PY) book/verify.py $(NB)

status: $(VENV)/.done  ## run every notebook and keep the record that the status page shows
	$(PYTEST) nbs
	cp $(RECORD) book/status.json

owner:  ## set the repository's owner everywhere: make owner NAME=someone
	@python3 .ci/owner.py "$(NAME)"

clean:  ## remove what was built (not .venv)
	rm -rf _book _build _docs _proc build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
