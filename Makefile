# The commands for contributors and new users. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install run demo routes test-tools test test-fast test-kills test-cluster-kills test-outages test-long test-engines test-properties histories cluster-programs cluster-images test-cluster test-faults e2e release-check publish scale lint type docs compatibility generate protobuf check packages package-check images sbom publish-packages release-notes workflows bench bench-compare bench-gpu rlve fuzz test-recipes clean

# Idle OpenMP threads must sleep: if they spin, a small machine becomes many times slower.
export OMP_WAIT_POLICY ?= PASSIVE
# Containers often disable bytecode, but tests start hundreds of programs: each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
# Go's compiler and the Kubernetes of the tests would spend a fifth of their time on garbage collection.
export GOGC ?= 400
export GOMEMLIMIT ?= 2GiB

BIN := .venv/bin
MODEL := HuggingFaceTB/SmolLM2-135M-Instruct
CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/tinkercloud
MODEL_FOLDER := $(CACHE)/SmolLM2-135M-Instruct
E2E_TESTS := install/test_installation.py install/test_pool_installation.py pods/test_trainer_pods.py
KILL_TESTS := pods/test_durable_sessions.py
FAULT_TESTS := $(addprefix operator/test_operator_,crash_points.py faults.py scale.py)
SHARDED_TESTS := $(addprefix tests/conformance/,training/test_training_with_the_sdk.py checkpoints/test_checkpoints_with_the_sdk.py)
TRAINER_TESTS := $(SHARDED_TESTS) $(addprefix tests/conformance/,bad_input sampling/test_sampling_with_the_sdk.py \
  training/test_custom_losses.py checkpoints/test_external_weights.py training/test_cookbook.py)
# SDK versions that tests exercise; `make compatibility` exercises more.
TESTED_SDKS := 0.16.1 0.24.1 0.38.0
PYTHON_FILES := $(wildcard pyproject.toml uv.lock */pyproject.toml)
# TINKERCLOUD_TEST_CLUSTER=existing runs the cluster tests on the cluster of KUBECONFIG, from which they load images with
# the command in TINKERCLOUD_TEST_IMAGE_LOADER. All tests share that cluster, so one worker runs them. Otherwise most tests
# wait for programs they have started, so that two workers suit even two cores. See docs/contribute/cluster-tests.md.
WORKERS ?= $(if $(filter existing,$(TINKERCLOUD_TEST_CLUSTER)),0,2)
CLUSTER_PROGRAMS := $(if $(filter existing,$(TINKERCLOUD_TEST_CLUSTER)),kubectl ray-operator kwok kueue helm)
# The bills of materials that are published with images of the Dockerfile.
BILLS := $(if $(TINKERCLOUD_TEST_ASSEMBLED_IMAGES),,sbom)
# Of `make test-fast`.
BASE ?= main
# Of `make histories`.
SEED ?= 0
COUNT ?= 1000
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help: ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: .venv/.installed ## install everything except CUDA libraries that CPU wheels do not need

.venv/.installed: tools/install.sh $(PYTHON_FILES)
	@test -d .venv || echo "The first installation loads torch, some gigabytes" >&2
	@tools/install.sh --all-groups
	@touch $@
	@echo "Installed" >&2

$(MODEL_FOLDER): | .venv/.installed
	@echo "Converting the model, once ..." >&2
	@$(BIN)/python -m tinkercloud_worker.convert_gguf \
	  "$$($(BIN)/python tools/find_smollm2.py)" $(MODEL_FOLDER)

run demo: export TINKERCLOUD_STATE_DIR ?= $(CURDIR)/.run

run: .venv/.installed $(MODEL_FOLDER) ## serve a small language model on 127.0.0.1:8000
	@$(BIN)/tinkercloud serve --model $(MODEL)=$(MODEL_FOLDER)

demo: .venv/.installed ## train, sample and resume against `make run`, in a second terminal
	@$(BIN)/tinkercloud demo

# Tests would make these themselves, but within their time limit.
test-tools: packages $(MODEL_FOLDER)
	@$(BIN)/python tools/cluster/build.py helm kubectl >/dev/null
	@PYTHONPATH=tests/support $(BIN)/python tools/compatibility/install.py $(TESTED_SDKS) >/dev/null

test: test-tools ## run all tests that need neither a cluster nor several ranks
	@$(PYTEST) --durations=10 tests/house tests/unit
	@$(PYTEST) --durations=10 tests/chaos tests/conformance tests/fuzz

test-fast: .venv/.installed ## run the house rules and the unit tests of what has changed since BASE (main)
	@$(BIN)/python tools/changed_tests.py $(BASE) | xargs $(PYTEST) --durations=10 tests/house

test-engines: .venv/.installed ## run the tests of trainers with several ranks and of SGLang
	@$(PYTEST) tests/engines/megatron tests/engines/sglang
	@$(BIN)/pytest tests/engines/ranks tests/engines/sdk
	@$(BIN)/pytest tests/conformance/training/test_training_with_the_sdk.py --trainer megatron-tp2

test-properties: .venv/.installed ## search for counterexamples to the properties of units with new random examples (by hand; half an hour)
	@$(PYTEST) tests/unit -m hypothesis --hypothesis-profile=search

histories: .venv/.installed ## run COUNT random histories of the operator from seed SEED on, and operators that are broken (by hand; 3 seconds each)
	@PYTHONPATH=tests/support $(BIN)/python -m tinkercloud_testing.simulation.histories --seed $(SEED) --count $(COUNT)
	@TINKERCLOUD_TEST_BROKEN_HISTORIES=30 $(BIN)/pytest -n $(WORKERS) -rP tests/unit/histories/test_broken_operators.py

cluster-programs: .venv/.installed ## compile the programs of the test cluster, once (15 minutes on two cores)
	@$(BIN)/python tools/cluster/build.py $(CLUSTER_PROGRAMS) >/dev/null

cluster-images: cluster-programs ## build the images of the test cluster and load them (15 minutes and 30 GB the first time)
	@PYTHONPATH=tests/support $(BIN)/python -m tinkercloud_testing.cluster.image_build.prepare

test-cluster: cluster-images $(MODEL_FOLDER) $(BILLS) ## run the tests on a real Kubernetes, those of `make e2e` included (needs Linux and root)
	@$(PYTEST) tests/cluster $(patsubst %,--ignore=tests/cluster/%,$(FAULT_TESTS) $(KILL_TESTS))

test-kills: export TINKERCLOUD_TEST_LONG = 1
test-kills: test-tools ## kill heads at 100 seeded moments of a training loop, and at every write of journals (by hand; an hour)
	@TINKERCLOUD_TEST_KILLS=100 TINKERCLOUD_TEST_STRIDE=1 $(PYTEST) tests/chaos/test_durable_runs.py tests/unit/journal

test-outages: test-tools ## fail disks for a minute and the checkpoint store for ten during training (by hand; 15 minutes; needs Linux and root)
	@TINKERCLOUD_TEST_DISK_SECONDS=60 TINKERCLOUD_TEST_STORE_SECONDS=600 $(BIN)/pytest -rP --show-capture=stdout \
	  tests/chaos/test_outages.py

test-long: export TINKERCLOUD_TEST_LONG = 1
test-long: test-tools cluster-images $(BILLS) ## run the long tests that the others leave out (by hand; needs Linux and root; downloads vLLM once)
	@$(PYTEST) -m long tests/chaos tests/conformance tests/unit tests/cluster
	@$(BIN)/pytest -m long tests/engines
	@$(BIN)/pytest $(TRAINER_TESTS) tests/conformance/training/test_suspension.py::test_a_pending_gradient_survives_a_restart --trainer torch-2 --trainer megatron-tp2
	@$(BIN)/pytest $(SHARDED_TESTS) --trainer torch-sharded
	@$(BIN)/pytest tests/conformance/training/test_images.py -k "training and not restart" --trainer torch-2 --trainer torch-sharded

test-cluster-kills: cluster-images ## lose heads 30 times with their container, pod or node, on a real Kubernetes (by hand; half an hour)
	@TINKERCLOUD_TEST_KILLS=30 $(BIN)/pytest -rP $(KILL_TESTS:%=tests/cluster/%)

test-faults: cluster-programs ## by hand, before a change of the operator: fail the API server, kill the operator at every write, create 200 sessions
	@$(BIN)/pytest $(FAULT_TESTS:%=tests/cluster/%)

e2e: export TINKERCLOUD_TEST_LONG = 1
e2e: cluster-images $(MODEL_FOLDER) $(BILLS) ## install, train (in trainer pods and a pool too), upgrade, resume and uninstall on a real Kubernetes
	@$(PYTEST) $(E2E_TESTS:%=tests/cluster/%)

release-check: export TINKERCLOUD_TEST_RELEASE = 1
release-check: export TINKERCLOUD_TEST_ASSEMBLED_IMAGES =
release-check: sbom images e2e ## as a release: build images of this commit and the one before, publish, install from the registry, upgrade, roll back (by hand; an hour and 60 GB)
	@$(BIN)/pytest -rP tests/cluster/install/test_release.py

publish: ## push images, bills of materials and charts to REGISTRY, such as ghcr.io/example
	@$(BIN)/python tools/release/publish.py $(REGISTRY)

scale: cluster-programs ## measure the operator with 1,000 sessions on simulated nodes
	@$(BIN)/python -m benchmarks.cluster.operator_scale

routes: .venv/.installed ## list the routes of the API server and of session heads: authentication, limits, audit, handlers
	@$(BIN)/python tools/routes.py

protobuf: .venv/.installed ## compile the protobuf messages of the Tinker API, after a change of messages.proto
	@cd protocol/src && ../../.uv/bin/uv tool run --quiet --python 3.11 --from grpcio-tools==1.62.3 \
		--with 'setuptools<80' python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. \
		tinkercloud_protocol/messages.proto

lint: .venv/.installed ## check style, imports and layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=tests/support $(BIN)/lint-imports

# It takes five minutes without the results of an earlier run, which clones share: mypy compares contents.
type: .venv/.installed ## check types
	@$(BIN)/mypy --cache-dir $(CACHE)/mypy

compatibility: .venv/.installed ## exercise SDK versions from 0.16 to the newest, and write docs/compatibility.md
	@PYTHONPATH=tests/support $(BIN)/python tools/compatibility/run.py \
	  $$(PYTHONPATH=tests/support $(BIN)/python tools/compatibility/install.py)
	@$(BIN)/python tools/write_docs.py

docs: .venv/.installed ## write the generated pages of docs/
	@$(BIN)/python tools/write_docs.py

generate: docs ## write all generated files: pages of docs/, custom resource definitions, charts
	@$(BIN)/python -m tinkercloud_crds.generate
	@$(BIN)/python tools/charts.py
	@$(BIN)/python tools/render_deploy.py

check: lint type ## check style, types, that generated files are up to date, and vendored ones those of npm
	@$(BIN)/python tools/write_docs.py --check
	@$(BIN)/python -m tinkercloud_crds.generate --check
	@$(BIN)/python tools/charts.py --check
	@$(BIN)/python tools/version.py --check
	@$(BIN)/python tools/vendored.py

packages: .venv/.installed ## build the wheels and source distributions of all packages in dist
	@rm -rf dist
	@.uv/bin/uv build --quiet --all-packages --out-dir dist

package-check: packages $(MODEL_FOLDER) ## install the packages into empty environments and run the demo and the tutorial there (by hand; 15 minutes on two cores)
	@$(BIN)/pytest -rP --show-capture=stdout tests/packages

images: ## build the images of the Dockerfile with buildah, without Docker (by hand; needs Linux and root)
	@tools/images/build.sh $(IMAGES)

publish-packages: .venv/.installed ## upload dist to PyPI with the identity of the release workflow (trusted publishing)
	@.uv/bin/uv publish --trusted-publishing always dist/*

release-notes: ## write build/release-notes.md from CHANGELOG.md; fails unless TAG names the version of the packages
	@python3 tools/release/notes.py "$(TAG)" build/release-notes.md

workflows: ## check .github/workflows with actionlint
	@go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 -color

sbom: .venv/.installed ## list the packages of the images and their licences in build/sbom
	@tools/sbom.sh build/sbom

bench: .venv/.installed ## measure, and compare with a plain Hugging Face loop
	@$(BIN)/python -m benchmarks

bench-compare: .venv/.installed ## show what became worse from the result A to the result B of `make bench`
	@$(BIN)/python -m benchmarks.compare $(A) $(B)

bench-gpu: .venv/.installed ## check and measure the engine on this machine's GPU; without one, check that the command works
	@$(BIN)/python -m benchmarks.gpu

rlve: .venv/.installed ## train a small model on an RLVE environment and draw the curve (by hand; 10 minutes on two cores)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m benchmarks.rlve

fuzz: .venv/.installed ## send servers 100,000 requests that no program would send, and time the operations of losses (by hand; at most two hours)
	@$(BIN)/python tools/fuzz.py --cases 100000 --minutes 60
	@TINKERCLOUD_TEST_LOSS_SECONDS=1 $(BIN)/pytest -q tests/unit/losses/test_loss_costs.py

test-recipes: .venv/.installed ## run two steps of each kind of training program of tinker-cookbook (by hand; minutes)
	@$(BIN)/pytest tests/recipes

clean: ## remove the environment and the state of `make run`
	rm -rf .venv .uv .run

.PHONY: docs-site diagrams test-browser console-pictures
MKDOCS_PACKAGES := mkdocs-material==9.8.2 pymdown-extensions==13.1.2 markdown==3.11.3

docs-site: .venv/.installed ## build the documentation as a website into build/site; broken links fail
	@NO_MKDOCS_2_WARNING=1 .uv/bin/uv tool run --quiet --from mkdocs==1.6.1 $(MKDOCS_PACKAGES:%=--with %) \
	  mkdocs build --strict

test-browser: cluster-programs ## look at all pages of the console with Chromium (the package chromium of Debian)
	@$(BIN)/pytest tests/browser

console-pictures: .venv/.installed $(MODEL_FOLDER) ## draw the pictures of docs/use/console.md with Chromium
	@TINKERCLOUD_TEST_PICTURES=1 $(BIN)/pytest tests/browser/test_pictures.py

diagrams: ## draw the pictures of docs/images (needs Graphviz)
	@for file in docs/images/*.dot; do dot -Tsvg $$file -o $${file%.dot}.svg; done
