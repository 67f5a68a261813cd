# Two commands: `make demo` watches a policy learn, `make test` checks everything that is quick.
# `make proofs` runs the tests that take longer; CI runs both. `make proofs-extra` runs more variants
# of the proofs, for which CI has no time: run it before a release.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLAIN := $(VENV)/.plain
READY := $(VENV)/.ready

.PHONY: demo test proofs proofs-ray proofs-others proofs-extra lint types imports tests

demo: $(PLAIN)
	@$(BIN)/burnish demo

test: lint types imports tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

# Threads sleep while they wait, as in burnish's own runs, or two processes take the cores from each
# other. Tests start hundreds of processes, and each would compile burnish if no bytecode were kept.
PYTEST := OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=1000 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest

# Tiny models keep one thread busy, so two processes share the tests.
tests: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) -m 'not slow' -n 2 --dist loadfile

# Two processes share the proofs as well. Tests on Ray differ in length more than files do.
RAY := tests/actors tests/integration/ray

proofs: proofs-others proofs-ray

proofs-others: $(READY)
	$(PYTEST) -m 'slow and not extra' -n 2 --dist loadfile --durations 25 $(addprefix --ignore ,$(RAY))

proofs-ray: $(READY)
	$(PYTEST) -m 'slow and not extra' -n 2 --dist worksteal --durations 25 $(RAY)

proofs-extra: $(READY)
	$(PYTEST) -m extra -n 2 --dist worksteal --durations 25

# What a run needs, and for the tests what checks it.
$(PLAIN): WANTED := .
$(READY): WANTED := .[dev]

# uv does not read pip's configuration, so it is handed pip's find-links: a machine that offers a CPU
# build of torch there gets that build. Where the environment has Python write no bytecode, it is
# compiled at once: each start of torch would compile it again, which takes seconds.
$(PLAIN) $(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "burnish needs Python 3.11 or newer, $(PYTHON) is older; use make PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV): a minute or two, most of it torch"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	links="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null)}"; \
	UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')" \
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt \
		$(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode) --editable '$(WANTED)'
	touch $@
