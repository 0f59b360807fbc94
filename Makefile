# The commands that matter: `make check` while you work, `make test` and `make
# book` before you commit, and `make nightly`. Each sets up everything it needs in
# .venv, from a bare clone and Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PY := $(VENV)/bin/python
NB ?=
# the paths of the notebooks that NB names, or of all
CHOSEN = $(PY) book/_ext/course.py notebooks $(NB)
RECORD ?= _proc/status.json
STATUS ?= book/status.json
GPU_STATUS ?= book/status_gpu.json
# processes of `make gpu`: all of them share the memory of one card
GPU_JOBS ?= 8
# environment variables for `make processors`; empty: what tests/processors.py chooses
SWITCH ?=
# for `make nightly` and `make processors`: the time, in seconds since 1970, after which
# they begin no further test and say how many are left; empty: they run all
UNTIL ?=
PORT ?= 8000
SECONDS ?= _proc/seconds.json
# one process for each core; more than 16 would only wait for the longest file
PYTEST := $(PY) -m pytest -n logical --maxprocesses 16 \
	--dist loadfile --no-loadscope-reorder \
	--nbval --nbval-current-env --nbval-sanitize-with tests/sanitize.cfg
# one thread a process: as many notebooks run side by side as there are cores
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# what one of many processes has compiled, the others need not
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lint check test nightly processors gpu book serve notebooks records bench \
	verify nouns status seconds owner clean

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
	$(VENV)/bin/ruff format --no-cache --check --output-format concise
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/codespell

check: lint $(VENV)/.done  ## lint, and the tests that your change concerns
	@files="$$($(PY) tests/affected.py)" && $(PYTEST) -m "not nightly" $$files

test: $(VENV)/.done  ## every notebook, and every test that is not marked nightly
	$(PYTEST) -m "not nightly" --record $(RECORD) --seconds $(SECONDS) nbs tests

nightly: $(VENV)/.done  ## the tests marked nightly, and every ✓ seen to fail
	$(PYTEST) -m nightly --seconds $(SECONDS) $(if $(UNTIL),--until $(UNTIL)) tests
	$(PY) book/verify.py --check $(if $(UNTIL),--until $(UNTIL))

processors: $(VENV)/.done  ## notebooks, and tests marked processor, as another processor computes
	$(PY) tests/processors.py run $(if $(SWITCH),--switch "$(SWITCH)") \
		$(PYTEST) -m "processor and not nightly" $(if $(UNTIL),--until $(UNTIL)) nbs tests

gpu: $(VENV)/.done  ## on a machine with a GPU: every notebook, and the tests that need one
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu needs a CUDA device, and PyTorch finds none")'
	failed=0; \
	TFORMER_DEVICE=cuda $(PYTEST) -n $(GPU_JOBS) --record $(GPU_STATUS) nbs || failed=1; \
	$(PYTEST) -n $(GPU_JOBS) --dist worksteal -m gpu --record $(GPU_STATUS) tests || failed=1; \
	exit $$failed

pretend: $(VENV)/.done  ## where there is no GPU: the lessons on a pretended one, which mixes no devices
	$(PY) tests/pretended_lessons.py $(if $(NB),$(wildcard $(addprefix nbs/,$(addsuffix *.ipynb,$(NB)))))

book: $(VENV)/.done  ## the site, in _book/_build/html; warnings are fatal
	$(VENV)/bin/nbdev_export
	$(PY) book/_ext/build_book.py _book

serve: book  ## build the site and open it
	@echo "http://127.0.0.1:$(PORT)/"
	@(sleep 1; $(PY) -m webbrowser "http://127.0.0.1:$(PORT)/") & \
	$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory _book/_build/html

notebooks: $(VENV)/.done  ## export, run, store outputs, clean: all, or NB="01 A2"
	@$(CHOSEN)
	$(VENV)/bin/nbdev_export
	OMP_NUM_THREADS=2 $(VENV)/bin/jupyter execute --inplace $$($(CHOSEN))
	$(VENV)/bin/nbdev_clean

records: $(VENV)/.done  ## run the recorded experiments again
	@for f in $(filter-out experiments/common.py,$(wildcard experiments/*.py)); do echo "$$f"; OMP_NUM_THREADS=2 $(PY) $$f || exit 1; done

bench: $(VENV)/.done  ## ratios against the named peers, as tables
	@for f in tests/bench/bench_*.py; do echo "$$f"; $(PY) $$f || exit 1; done

nouns: $(VENV)/.done  ## the further changes of the claims, one for each of their nouns
	$(PY) book/verify.py --check --nouns

verify: $(VENV)/.done  ## see each claim of the book turn red: all, or NB="01 07"
	$(PY) book/verify.py $(NB)

status: $(VENV)/.done  ## run every notebook and keep the record that the status page shows
	$(PYTEST) --record $(RECORD) nbs
	cp $(RECORD) $(STATUS)

seconds: test nightly  ## keep the seconds of each file, by which tests are ordered
	cp $(SECONDS) tests/seconds.json

owner:  ## set the repository's owner: make owner NAME=someone; make owner NAME= unsets it
	@python3 .ci/owner.py $(if $(filter command,$(origin NAME)),"$(NAME)")

clean:  ## remove what was built (not .venv)
	rm -rf _book _build _docs _proc build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
