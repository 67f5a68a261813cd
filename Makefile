# Two commands: `make demo` watches a policy learn, `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types imports tests

demo: $(READY)
	@$(BIN)/burnish demo

test: lint types imports tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

tests: $(READY)
	$(BIN)/pytest

# uv does not read pip's configuration, so it is handed pip's find-links: a machine that offers a CPU
# build of torch there gets that build. Bytecode is compiled at once: where the environment has Python
# write none, each start of torch would compile it again, which takes seconds.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "burnish needs Python 3.11 or newer, $(PYTHON) is older; use make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	links="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null)}"; \
	UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')" \
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
