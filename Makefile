# One word per chore. Everything but `make gpu` runs on a laptop: Linux, Python 3.11 or newer, make.

PYTHON ?= python3
BIN := .venv/bin
# What the product runs on, and what checks it besides.
RUNS := embedded,engine,otel,reader
CHECKS := training,dev
# Modules are compiled when they are first imported: most of what torch brings never is.
INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# More test processes than two cores: most tests wait for a process, a server or a timeout rather than for the CPU.
JOBS ?= 4

# The tests and the demo start many processes: each would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test soak peers test-ray check audit fix bench aot gpu gpu-rows lock pin rules release clean

setup: .venv/.ready

# Python's own pip takes twice as long as today's.
.venv/.runs: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tollgate needs Python 3.11 or newer; say which: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv; the first time takes about a minute."
	@$(INSTALL) --upgrade pip
	$(INSTALL) -c constraints.txt -e '.[$(RUNS)]'
	@touch $@

.venv/.ready: .venv/.runs
	$(INSTALL) -c constraints.txt -e '.[$(RUNS),$(CHECKS)]'
	@command -v npm >/dev/null && npm install --prefix tests/node --no-audit --no-fund --no-package-lock --fetch-retries=0 --silent \
		|| echo "SKIPPED: no npm, or no network for it; the tests of OpenAI's package for Node are left out."
	@touch $@

# `make demo ARGS="--port 9000"` where 8000 is taken.
demo: .venv/.runs
	@exec $(BIN)/tollgate dev $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not soak and not gpu and not peers and not ray"

# By two processes: one has the money's faults for an hour, the other all else.
soak: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m soak --timeout 3600

# Other makers' programs around ours, each SKIPPED where it is not installed: make peers PEERS=FOLDER
peers: setup
	PEERS=$(PEERS) $(BIN)/python -m pytest -m peers --timeout 600

# On a real Ray cluster of this machine; SKIPPED where Ray is not installed: .venv/bin/pip install 'ray>=2.50,<3'
test-ray: setup
	$(BIN)/python -m pytest -m ray --timeout 300

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/audit

# Known vulnerabilities of what is shipped; a part of `make check`.
audit: setup
	$(BIN)/python .ci/audit

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.quotas
	$(BIN)/python -m benchmarks.streams
	$(BIN)/python -m benchmarks.overload
	$(BIN)/python -m benchmarks.precision --out benchmarks/results/precision-cpu.md

# Compiles every kernel for a GPU that need not be there: its registers, spills and shared memory. By another Triton:
# pip install --no-deps --target FOLDER triton==3.6.0; make aot TRITON=FOLDER
aot: setup
	PYTHONPATH=$(TRITON) $(BIN)/python -m benchmarks.compile_ahead --out benchmarks/results

gpu:
	$(PYTHON) -m benchmarks.gpu

# What a vendor publishes for this GPU, ways of batching, long prompts among replies, paced arrivals, guesses, fewer
# bits: about an hour, each part in a process and a time of its own; `make gpu-rows PART=70B` those with the word in
# their name.
gpu-rows:
	$(PYTHON) -m benchmarks.gpu --rows --only "$(PART)"

# What the images are built of, to the digest: constraints.txt's versions, and what torch brings on a GPU beside them.
LOCK := --universal --python-version 3.11 --generate-hashes --no-annotate --no-header -c constraints.txt pyproject.toml -
lock: setup
	$(INSTALL) uv
	echo 'setuptools>=77' | $(BIN)/uv pip compile --quiet --extra otel --extra reader $(LOCK) -o locks/gateway.txt
	echo 'setuptools>=77' | $(BIN)/uv pip compile --quiet --extra engine --extra vision $(LOCK) -o locks/engine.txt

# The images of compose.yaml and the Dockerfile, to the digest; SKIPPED where no registry answers.
pin:
	$(PYTHON) deploy/pin.py

# The alerts for the Prometheus operator, from deploy/alerts.yml.
rules:
	$(PYTHON) deploy/rules.py

# What a release consists of, in dist/: wheel, source archive, and what the images are built of as bills of materials.
release: setup
	$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist")'
	$(BIN)/python -c 'from setuptools import build_meta as b; b.build_wheel("dist")'
	$(BIN)/python deploy/sbom.py gateway > dist/tollgate-gateway.cdx.json
	$(BIN)/python deploy/sbom.py engine > dist/tollgate-engine.cdx.json

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
