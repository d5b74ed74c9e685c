# make serve [CONFIG=configs/x.yaml]   set up, check the config, start, wait until ready, print a curl to paste
# make stop                            end what `make serve` started
# make test [ARGS='-m slow']           set up and run the tests
# make lint                            ruff and mypy
# make clean                           remove the environment and all caches (not worldstage-data/, the results)
#
# PYTHON=/path/to/python chooses the interpreter of the environment (3.11 or newer).

CONFIG ?= configs/demo.yaml
ARGS ?=
export PYTHON

.PHONY: serve stop test lint clean
.NOTPARALLEL:

serve: .venv/.ready-serve
	@.venv/bin/python -m app.launch serve $(CONFIG)

stop:
	@if [ -d .run ]; then .venv/bin/python -m app.launch stop; else echo "nothing runs"; fi

test: .venv/.ready-test
	.venv/bin/python -m pytest $(ARGS)

lint: .venv/.ready-lint
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

clean: stop
	rm -rf .venv .run build ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready-%: pyproject.toml constraints.txt .ci/setup
	.ci/setup $*
