# Every target prepares what it needs by itself: `make test` on a fresh Debian 12 or 13 is enough.
# As root, since the laboratory needs namespaces and mounts (`make lint` does not, once bootstrapped).

PYTHON := .venv/bin/python
# Under make a laboratory that cannot be built is a failure, never a skipped test.
export ACCELVISOR_LAB_REQUIRED := 1

.PHONY: help bootstrap demo demo-embedded test test-nightly test-unit test-lab lint deb bench fuzz \
	lab-up lab-down clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

bootstrap: ## prepare this machine and .venv
	@scripts/bootstrap

demo: bootstrap ## two hosts, a VM and its accelerator function, which computes and moves
	@$(PYTHON) -m accelvisor.lab demo

demo-embedded: ## the same without root, QEMU or systemd
	@scripts/bootstrap --embedded
	@$(PYTHON) -m accelvisor.embedded

lint: bootstrap ## ruff, mypy --strict, import rules
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports

test: lint ## lint, then every test, the laboratory's included
	@scripts/test $(PYTEST)

test-nightly: lint ## the same with every repetition (an hour)
	@ACCELVISOR_NIGHTLY=1 scripts/test $(PYTEST)

test-unit: bootstrap ## the tests that need no laboratory
	@$(PYTHON) -m pytest -m 'not lab' $(PYTEST)

test-lab: bootstrap ## the tests that need the laboratory
	@$(PYTHON) -m pytest -m lab tests/lab $(PYTEST)

deb: bootstrap ## the Debian packages, in dist/
	@$(PYTHON) -m accelvisor.lab deb --output dist

bench: bootstrap ## every benchmark, as a table (BENCH="device --quick")
	@$(PYTHON) -m benchmarks $(BENCH)

fuzz: bootstrap ## ten minutes of generated input at every parser (FUZZ_SECONDS=600)
	@$(PYTHON) -m tests.fuzz --seconds $${FUZZ_SECONDS:-600}

lab-up: bootstrap ## boot the laboratory and leave it running (HOSTS=2)
	@$(PYTHON) -m accelvisor.lab up --hosts $${HOSTS:-1}

lab-down: bootstrap ## take it away again
	@$(PYTHON) -m accelvisor.lab down

# The laboratory goes first: what it has mounted must not be deleted under it, and one that somebody
# still uses not at all.
clean: ## remove .venv, what was built, and the laboratory's caches
	@scripts/clean-lab
	@rm -rf .venv .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache .benchmarks *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
