# `make` alone prints this help.
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
READY := .venv/.ready
export PATH := $(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup repro test test-all test-hard test-systems test-engines test-fast engines lint lock audit golden pictures faults chaos mutate fuzz bench bench-gpu up ui

help: ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## install what requirements-dev.lock names into .venv

$(READY): requirements-dev.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit("Lockstep needs Python 3.11, 3.12 or 3.13, this is %d.%d; name another with: make PYTHON=python3.11" % v)'
	@echo "installing into .venv (6 GB with CUDA; a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # what pip would compile on one core; some packages hold files that are no Python
	@touch $@

repro: $(READY) ## set up, then prepare, train and evaluate
	@LOCKSTEP_TYPED_COMMAND="$${LOCKSTEP_TYPED_COMMAND:-make repro}" dvc repro

# By what they start: ranks and commands; faults and containers; another Debian and an image from nothing.
FAST := not slow and not docker and not gpu
PYTEST := python -m pytest --durations=15 --no-fold-skipped
# A worker for each core, four at most; the tests of a file stay together. In test-all workers take single tests from each other.
WORKERS := -n logical --maxprocesses=4 --dist
PARALLEL := $(WORKERS) loadfile
# One more than cores where tests wait for the ends of processes; tests/conftest.py has them in order.
WAITING := -n $(shell n=$$(($$(getconf _NPROCESSORS_ONLN) + 1)); echo $$((n < 4 ? n : 4))) --no-loadscope-reorder --dist loadfile

test: $(READY) ## set up, then the tests that need neither containers nor long campaigns
	@$(PYTEST) $(PARALLEL) -m "$(FAST)" && $(PYTEST) $(WAITING) -m "slow and not (fault or chaos or docker or gpu or system or engine or slurm)"

test-all: test ## the same, then faults, containers and chaos
	@$(MAKE) --no-print-directory test-hard

test-hard: $(READY) ## GPUs, if there are some; faults, containers and chaos
	@$(PYTEST) -m gpu tests/ranks; gpu=$$?; $(PYTEST) $(WORKERS) worksteal -m "(docker or slow and (fault or chaos)) and not (gpu or system or engine or slurm)" && exit $$gpu

test-systems: $(READY) ## another Debian, with another Python; an image built without a cache
	@LOCKSTEP_NO_SKIPS=1 $(PYTEST) -m system
	@sha256sum requirements.lock requirements-dev.lock Dockerfile tests/containers/test_other_system.py > .ci/systems.sha256

# Each engine has packages that would not go together with ours, nor with each other's.
ENGINES := .venv-ray/.ready .venv-skypilot/.ready .venv-dstack/.ready
.venv-ray/.ready: NAMES := ray[default]==2.60.0
.venv-skypilot/.ready: NAMES := skypilot==0.14.1
.venv-dstack/.ready: NAMES := dstack==0.22.5

$(ENGINES): %/.ready: | $(READY)
	@echo "installing $(NAMES) into $*"
	@$(BIN)/python -m venv $* && $*/bin/pip install --quiet --disable-pip-version-check "$(NAMES)" && touch $@

engines: $(ENGINES) ## install Ray, SkyPilot and dstack, each into an environment of its own; 1 GB

test-engines: engines ## trainings on a real Ray, and on Slurm where there is one; files and graces of SkyPilot and dstack
	@$(PYTEST) -m "engine or slurm"

test-fast: $(READY) ## the fast tests
	@$(PYTEST) $(PARALLEL) -m "$(FAST)"

lint: $(READY) ## ruff, pyright, shellcheck and hadolint
	@ruff check . && ruff format --check . && pyright
	@shellcheck .ci/run levels/run deploy/*.sh && hadolint Dockerfile

LOCK := uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	--custom-compile-command "make lock" --quiet

lock: $(READY) ## make requirements-dev.lock, and requirements.lock without the tools, anew from pyproject.toml
	@$(LOCK) --extra dev --output-file requirements-dev.lock
	@$(LOCK) --constraint requirements-dev.lock --output-file requirements.lock

# Strict: what could not be asked about fails it, or a service that does not answer would look like no finding.
audit: $(READY) ## ask whether a package of the locks has a known hole
	@for lock in requirements.lock requirements-dev.lock; do uv tool run --quiet pip-audit --strict --disable-pip --require-hashes -r $$lock || \
	{ echo "make audit: a hole was found, or as above a package could not be asked about; if this index knows of none, nothing was audited (SECURITY.md)"; exit 1; }; done

golden: $(READY) ## write the golden losses of this kind of machine
	@python -m pytest tests/ranks/test_golden.py --write-golden

pictures: $(READY) ## train what the README shows, and photograph it; needs Debian's chromium
	@python -m tests.kit.pictures

faults: $(READY) ## every case of what a run must survive, with a table of what happened
	@python -m pytest -p tests.faults.report -m fault

SEED ?= 1
N ?= 100

chaos: $(READY) ## N faults at random points of small runs; SEED repeats a campaign
	@python -m tests.faults.chaos --seed $(SEED) --faults $(N)

mutate: $(READY) ## break modules in every small way, one at a time: do their tests notice? MODULE=config for one; an hour for all
	@python -m tests.kit.mutation $(MODULE)

fuzz: $(READY) ## property tests with new random examples; prints the seed
	@seed=$$(python -c 'import random; print(random.randrange(10**9))') && echo "seed $$seed" && \
	python -m pytest -m "$(FAST)" --hypothesis-profile=fuzz --hypothesis-seed=$$seed tests/unit

BENCH :=

bench-gpu: $(READY) ## what only a GPU can show, in parts of ten minutes at most; BENCH names parts, or --rehearse for a CPU
	@python bench/gpu.py $(BENCH)

bench: $(READY) ## what a step, a training, a start and a no-op cost, and against whom; BENCH names parts of it
	@python bench/run.py $(BENCH)

# As the owner of this folder, whose files they are to be.
COMPOSE := env UID=$$(ls -nd . | awk '{print $$3}') GID=$$(ls -nd . | awk '{print $$4}') LOCKSTEP_COMMIT=$$(git rev-parse HEAD)

up: ## the pipeline in containers: leader, worker, and MLflow's UI on 127.0.0.1:5000
	@$(COMPOSE) docker compose build
	@$(COMPOSE) LOCKSTEP_IMAGE=$$(docker image inspect --format '{{.Id}}' $${LOCKSTEP_NAME:-lockstep}) docker compose up

IN := .
PORT := 5000

# Without the lifespan events of uvicorn, which Ctrl-C now and then ends with a traceback.
ui: $(READY) ## MLflow's UI on the local store, on 127.0.0.1:5000; IN=FOLDER names another store's folder, PORT=NUMBER another port
	@cd "$(IN)" && MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false exec mlflow server --host 127.0.0.1 --port $(PORT) --workers 1 --uvicorn-opts "--lifespan off" --backend-store-uri sqlite:///mlflow.db --artifacts-destination mlartifacts
