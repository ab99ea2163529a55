# Every target sets itself up on a machine that has only Python >= 3.10, a C compiler and make.
# PYTHON: the interpreter that makes the virtual environment.  PIP_ARGS: further options for pip.
PYTHON ?= python3
PIP_ARGS ?=
# TRACE: a trace for `make demo` to replay.  DEMO_ARGS, PYTEST_ARGS, BENCH_ARGS: passed on.
TRACE ?=
DEMO_ARGS ?=
PYTEST_ARGS ?= -n auto
BENCH_ARGS ?=
SOAK_SECONDS ?= 600

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(PIP_ARGS)
OLD_BIN := .venv-triton-old/bin
OLD_PIP := $(OLD_BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# pip's editable install of mapped folders is an import hook, which mypy and pyright cannot follow. A link in
# site-packages they can; new files are there at once, and it adds no name beside kvcache.
LINK = ln -sfn '$(CURDIR)/kvcache' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvcache"
# not `python -m pytest`: that puts the root on sys.path
PYTEST := $(BIN)/pytest $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-triton-old lint format types docs bench bench-peers gpu-check wheel-check coverage mutants soak clean

help:
	@echo 'make demo         replay a workload under all policies (TRACE=path: replay that trace)'
	@echo 'make test         all tests that need no GPU'
	@echo 'make test-triton-old  interpreted, compiled and native kernels under triton 3.6.0'
	@echo 'make lint         ruff: check and format --check (make format: repair)'
	@echo 'make types        mypy'
	@echo 'make docs         the documentation as a site, in build/site; a warning fails'
	@echo 'make bench        kvcache bench (BENCH_ARGS), and the scripts of perf/'
	@echo 'make gpu-check    on a machine with a GPU: tests, sanitizer, benchmarks, number goals (OUT=folder)'
	@echo '                  no network there: python3 tools/gpu_check.py, which says what it needs'
	@echo 'make bench-peers  side by side with SGLang (BENCH_ARGS=--quick: about a minute)'
	@echo 'make wheel-check  build the wheel, install it beside packages of the same names, import it'
	@echo 'make coverage     branch coverage of the tests, with numba off'
	@echo 'make mutants      plant bugs in a copy of the sources and see a test fail for each'
	@echo 'make soak         property test, validator and storms, for minutes (SOAK_SECONDS)'
	@echo 'make clean        remove what was built, the virtual environment included'

# the stamps: an install is repeated when the project file or a pin changed
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'installing into .venv (a few minutes the first time)'
	$(PIP) -e '.[test,plot]'
	$(LINK)
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -e '.[test,plot,dev]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP) -e '.[test,plot,docs]'
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

# what constraints.txt pins, but the oldest Triton that pyproject.toml admits; torch may ask for another one
.venv-triton-old/.installed: pyproject.toml constraints.txt
	test -x $(OLD_BIN)/python || $(PYTHON) -m venv .venv-triton-old
	@echo 'installing into .venv-triton-old (a few minutes the first time)'
	$(OLD_PIP) -c constraints.txt -e '.[test]'
	$(OLD_PIP) --no-deps triton==3.6.0
	@touch $@

test-triton-old: .venv-triton-old/.installed
	TRITON_INTERPRET=1 $(OLD_BIN)/pytest $(PYTEST_ARGS) tests/interp
	$(OLD_BIN)/pytest $(PYTEST_ARGS) tests/aot tests/native

# numba's compiler is off: what it compiles, coverage does not see. The tests left out are about the compiler, or
# take hours without it.
UNCOMPILED := --ignore=tests/interp --ignore=tests/aot --ignore=tests/native --ignore=tests/package/test_compiled.py \
	--ignore=tests/replay/test_replay_traces_full.py --ignore=tests/package/test_cli.py
coverage: export NUMBA_DISABLE_JIT = 1
coverage: .venv/.installed-dev
	TRITON_INTERPRET=1 $(PYTEST) --cov --cov-report= tests/interp
	$(PYTEST) --cov --cov-append --cov-report=term --cov-report=html $(UNCOMPILED) tests

mutants: .venv/.installed
	$(BIN)/python tests/mutants/run.py

soak: .venv/.installed
	$(PYTEST) tests/oracle/test_stateful.py --hypothesis-profile=soak
	$(BIN)/kvcache validate --seconds $(SOAK_SECONDS)
	$(BIN)/python tests/replay/storm.py --seconds $(SOAK_SECONDS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.installed-dev
	$(BIN)/mypy
	$(BIN)/mypy tools

# what the site holds of the sources is read, never imported. The variable: mkdocs-material would print news.
docs: export NO_MKDOCS_2_WARNING = 1
docs: .venv/.installed-docs
	$(BIN)/mkdocs build --strict

# files, not modules: see PYTEST above. perf/compile_table.py is no benchmark: it writes what tests/aot compares with.
bench: .venv/.installed
	$(BIN)/kvcache bench $(BENCH_ARGS)
	$(BIN)/python perf/launches.py
	$(BIN)/python perf/limit.py

# in an environment of its own, which it makes; says why and ends with status 0 where SGLang cannot run
bench-peers:
	$(PYTHON) perf/peers/run.py --pip-args='$(PIP_ARGS)' -- $(BENCH_ARGS)

gpu-check: .venv/.installed
	$(BIN)/python tools/gpu_check.py

wheel-check: .venv/.installed-dev
	$(BIN)/python tools/wheel_check.py

clean:
	rm -rf .venv .venv-triton-old .venv-peers build dist htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find kvcache kernels tree tests perf tools examples -name __pycache__ -prune -exec rm -rf {} +
