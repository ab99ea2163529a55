# Every target sets itself up on a machine that has only Python >= 3.10, a C compiler and make.
# PYTHON: the interpreter that makes the virtual environment.  PIP_ARGS: further options for pip.
PYTHON ?= python3
PIP_ARGS ?=
# TRACE: a trace for `make demo` to replay.  DEMO_ARGS, PYTEST_ARGS, BENCH_ARGS: passed on.
TRACE ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_SECONDS ?= 600

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(PIP_ARGS)
# not `python -m pytest`: that puts the root on sys.path, and `import kernels` would find our folder
PYTEST := $(BIN)/pytest $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types bench bench-peers wheel-check coverage mutants soak clean

help:
	@echo 'make demo         replay a workload under all policies (TRACE=path: replay that trace)'
	@echo 'make test         all tests that need no GPU'
	@echo 'make lint         ruff: check and format --check (make format: repair)'
	@echo 'make types        mypy'
	@echo 'make bench        the benchmarks of perf/'
	@echo 'make bench-peers  side by side with SGLang (BENCH_ARGS=--quick: about a minute)'
	@echo 'make wheel-check  build the wheel, install it beside packages of the same names, import it'
	@echo 'make coverage     make test, with branch coverage'
	@echo 'make mutants      plant bugs in a copy of the sources and see a test fail for each'
	@echo 'make soak         property test, validator and storms, for minutes (SOAK_SECONDS)'
	@echo 'make clean        remove what was built, the virtual environment included'

# the stamps: an install is repeated when the project file or a pin changed
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'installing into .venv (a few minutes the first time)'
	$(PIP) -e '.[test,plot]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -e '.[test,plot,dev]'
	@touch $@

demo: .venv/.installed
ifeq ($(strip $(TRACE)),)
	$(BIN)/kvcache replay --workload shared-prompt --compare $(DEMO_ARGS)
else
	$(BIN)/kvcache replay '$(TRACE)' --compare $(DEMO_ARGS)
endif

# two processes: triton.jit reads TRITON_INTERPRET when it decorates, so one process cannot do both
test: .venv/.installed
	TRITON_INTERPRET=1 $(PYTEST) tests/interp
	$(PYTEST) --ignore=tests/interp tests

coverage: .venv/.installed-dev
	TRITON_INTERPRET=1 $(PYTEST) --cov --cov-report= tests/interp
	$(PYTEST) --cov --cov-append --cov-report=term --cov-report=html --ignore=tests/interp tests

mutants: .venv/.installed
	$(BIN)/python tests/mutants/run.py

soak: .venv/.installed
	$(PYTEST) tests/test_stateful.py --hypothesis-profile=soak
	$(BIN)/kvcache validate --seconds $(SOAK_SECONDS)
	$(BIN)/python tests/storm.py --seconds $(SOAK_SECONDS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.installed-dev
	$(BIN)/mypy
	$(BIN)/mypy tools

# every script of perf/ but its helpers (_*.py), run as files, not as modules: see PYTEST above
bench: .venv/.installed
	set -e; for file in $(filter-out perf/_%,$(wildcard perf/*.py)); do echo "== $$file"; $(BIN)/python "$$file" $(BENCH_ARGS); done

# in an environment of its own, which it makes; says why and ends with status 0 where SGLang cannot run
bench-peers:
	$(PYTHON) perf/peers/run.py --pip-args='$(PIP_ARGS)' -- $(BENCH_ARGS)

wheel-check: .venv/.installed-dev
	$(BIN)/python tools/wheel_check.py

clean:
	rm -rf .venv .venv-peers build dist htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find kvcache kernels tree tests perf tools examples -name __pycache__ -prune -exec rm -rf {} +
