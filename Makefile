# `make demo` and `make test` are the two set-up commands; each makes .venv in the clone when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint check unit bench clean

demo: .venv/run
	$(BIN)/hemiola generate --prompt '"I am very glad to see you," said Elizabeth,' \
		--max-tokens 160 --temperature 0.8 --top-p 0.95 --repetition-penalty 1.1 --seed 1

test: lint check unit

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: .venv/test
	$(BIN)/mypy

unit: .venv/test
	$(BIN)/python -m pytest -q --durations=10

bench: .venv/test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m benchmarks.cpu

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/run: requirements/run.txt pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/run.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

.venv/test: requirements/test.txt .venv/run
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/test.txt
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
