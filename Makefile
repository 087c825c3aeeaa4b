# Every target does its own set-up: on a fresh machine only make and a Python 3.11-3.13 are needed.
# PYTHON=python3.12 picks the interpreter of a new .venv; WORKERS=4 runs the tests in four
# processes instead of two (0: in one, for a debugger).

BIN := .venv/bin
WORKERS ?= 2
SETUP_INPUTS := scripts/setup pyproject.toml requirements-dev.txt
export PYTHON
# The tests start hundreds of Pythons: each would compile geneva anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check test-quick test-slow test-slow-short test-long test-failed bench format lock clean
.DEFAULT_GOAL := test

demo: .venv/.ready-runtime        ## make a table, add UDF columns, watch them fill
	$(BIN)/geneva demo

test: check test-quick            ## everything a change must pass

check: .venv/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test-quick: .venv/.ready-dev
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-slow: .venv/.ready-dev       ## crashes, clusters, browsers, every format
	$(BIN)/pytest -m "slow and not long" $(PYTEST_ARGS)

test-slow-short: .venv/.ready-dev ## the same tests, one round each
	GENEVA_SLOW_ROUNDS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal -m "slow and not long" $(PYTEST_ARGS)

test-long: .venv/.ready-dev       ## storms, long random histories, big tables: minutes to hours
	$(BIN)/pytest -m long $(PYTEST_ARGS)

test-failed: .venv/.ready-dev     ## what failed last, once more; if nothing did, that is an error
	GENEVA_SLOW_ROUNDS=1 $(BIN)/pytest --last-failed --last-failed-no-failures none -m "" $(PYTEST_ARGS)

bench: .venv/.ready-runtime       ## this engine against a plain pylance loop
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

format: .venv/.ready-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock:                             ## renew requirements-dev.txt (needs all three Pythons)
	scripts/lock python3.11 python3.12 python3.13

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	rm -rf spark-warehouse metastore_db derby.log

.venv/.ready-runtime: $(SETUP_INPUTS)
	scripts/setup runtime

.venv/.ready-dev: $(SETUP_INPUTS)
	scripts/setup dev
