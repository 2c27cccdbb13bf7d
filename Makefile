# The two commands of the README: `make quickstart` and `make test`. Both set up all they need.
.PHONY: quickstart test test-vllm lint format docs wheel clean
.DELETE_ON_ERROR:

BIN := .venv/bin

quickstart:
	@python3 tools/bootstrap.py all
	@$(MAKE) --no-print-directory models/quickstart/config.json
	@$(BIN)/hpcrl submit recipes/quickstart.yaml --follow

# the start model is made again when the recipe changes
models/quickstart/config.json: recipes/quickstart.yaml
	$(BIN)/hpcrl warmup recipes/quickstart.yaml --replace

# tests at a time: faults of whole runs mostly wait
WORKERS ?= 2

# real vLLM engines have an environment of their own (2.7 GB), and come one test at a time: an engine needs all cores
# when it starts, and a run has several
test: lint
	@python3 tools/bootstrap.py all dev --slurm --vllm
	@$(BIN)/python tools/run_tests.py --workers $(WORKERS) -m "not vllm"
	@$(BIN)/python tools/run_tests.py -m "vllm and not nightly"

# those that lose engines, sides and nodes of whole runs, too
test-vllm:
	@python3 tools/bootstrap.py all dev --slurm --vllm
	@$(BIN)/python tools/run_tests.py -m vllm

lint:
	@python3 tools/bootstrap.py all dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format:
	@python3 tools/bootstrap.py all dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# what is generated from code: docs/configuration.md, docs/cli.md, the picture in docs/architecture.md
docs:
	@python3 tools/bootstrap.py all dev
	@$(BIN)/python tools/generate_docs.py
	@$(BIN)/python tools/draw_rooms.py

wheel:
	@python3 tools/bootstrap.py all dev
	@$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf .venv .venv-vllm dist build .mypy_cache .ruff_cache .pytest_cache
