# Everything a contributor or a new user runs. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install run demo test test-engines test-cluster test-faults e2e scale lint type docs generate check sbom bench bench-gpu clean

# OpenMP's threads must sleep when idle: spinning ones slow a small machine down many times over.
export OMP_WAIT_POLICY ?= PASSIVE
# Containers often forbid bytecode. But tests start hundreds of programs, each of which would compile torch's source anew.
unexport PYTHONDONTWRITEBYTECODE
export TINKERCLOUD_STATE_DIR ?= $(CURDIR)/.run

BIN := .venv/bin
MODEL := HuggingFaceTB/SmolLM2-135M-Instruct
CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/tinkercloud
MODEL_FOLDER := $(CACHE)/SmolLM2-135M-Instruct
E2E_TESTS := test_installation.py test_trainer_pods.py
LONG_CLUSTER_TESTS := $(E2E_TESTS) test_operator_faults.py
SHARDED_TESTS := $(addprefix tests/conformance/,test_training_with_the_sdk.py test_checkpoints_with_the_sdk.py)
TRAINER_TESTS := $(SHARDED_TESTS) $(addprefix tests/conformance/,bad_input test_sampling_with_the_sdk.py \
  test_cookbook.py test_suspension.py::test_a_gradient_that_was_not_applied_survives_a_restart)
PYTHON_FILES := $(wildcard pyproject.toml uv.lock */pyproject.toml)
# Most tests wait for programs they have started, so even two cores have time for two at once.
# A cluster that is not ours is shared by all tests.
WORKERS ?= $(if $(filter existing,$(TINKERCLOUD_TEST_CLUSTER)),0,2)
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

install: .venv/.installed ## install everything but CUDA libraries a CPU wheel makes unnecessary

.venv/.installed: tools/install.sh $(PYTHON_FILES)
	@echo "Installing (the first time: torch, some gigabytes) ..." >&2
	@tools/install.sh --all-groups
	@touch $@

$(MODEL_FOLDER): | .venv/.installed
	@echo "Converting the model, once ..." >&2
	@$(BIN)/python -m tinkercloud_worker.convert_gguf \
	  "$$($(BIN)/python tools/find_smollm2.py)" $(MODEL_FOLDER)

run: .venv/.installed $(MODEL_FOLDER) ## serve a real small language model on 127.0.0.1:8000
	@$(BIN)/tinkercloud serve --model $(MODEL)=$(MODEL_FOLDER)

demo: .venv/.installed ## train, sample and resume against `make run`, in a second terminal
	@$(BIN)/python examples/demo.py

test: .venv/.installed ## run all tests that need no cluster and one rank
	@$(PYTEST) tests/house tests/unit
	@$(PYTEST) tests/chaos tests/conformance

test-engines: .venv/.installed ## run the tests of trainers of many ranks, and of inference servers (fetches vLLM once)
	@$(PYTEST) tests/engines/megatron tests/engines/sglang
	@$(BIN)/pytest tests/engines/ranks tests/engines/sdk tests/engines/test_external_inference.py
	@$(BIN)/pytest $(TRAINER_TESTS) --trainer torch-2 --trainer megatron-tp2
	@$(BIN)/pytest $(SHARDED_TESTS) --trainer torch-sharded

test-cluster: .venv/.installed ## run the tests on a real Kubernetes, compiled here once (needs Linux and root)
	@$(PYTEST) tests/cluster $(LONG_CLUSTER_TESTS:%=--ignore=tests/cluster/%)

test-faults: .venv/.installed ## let the API server fail, kill the operator at every write, make 200 sessions
	@$(BIN)/pytest tests/cluster/test_operator_crash_points.py tests/cluster/test_operator_faults.py tests/cluster/test_operator_scale.py

e2e: .venv/.installed $(MODEL_FOLDER) ## install, train (in trainer pods too), upgrade, resume and uninstall on that Kubernetes
	@$(BIN)/pytest $(E2E_TESTS:%=tests/cluster/%)

scale: .venv/.installed ## measure the operator with 1,000 sessions on played nodes
	@$(BIN)/python -m benchmarks.operator_scale

lint: .venv/.installed ## check style, imports and layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=tests/support $(BIN)/lint-imports

type: .venv/.installed ## check types
	@$(BIN)/mypy

docs: .venv/.installed ## write the generated pages of docs/
	@$(BIN)/python tools/write_docs.py

generate: docs ## write everything that is generated: pages of docs/, definitions of custom resources
	@$(BIN)/python -m tinkercloud_crds.generate
	@$(BIN)/python tools/charts.py
	@$(BIN)/python tools/render_deploy.py

check: lint type ## lint, types, and that everything generated is fresh
	@$(BIN)/python tools/write_docs.py --check
	@$(BIN)/python -m tinkercloud_crds.generate --check
	@$(BIN)/python tools/charts.py --check

sbom: .venv/.installed ## write what the images install, and under which licences, to build/sbom
	@tools/sbom.sh build/sbom

bench: .venv/.installed ## measure, side by side with a plain Hugging Face loop
	@$(BIN)/python -m benchmarks

bench-gpu: .venv/.installed ## check and measure the engine on this machine's GPU; without one, that the command works
	@$(BIN)/python -m benchmarks.gpu

clean: ## remove the environment and the state of `make run`
	rm -rf .venv .uv .run

.PHONY: docs-site diagrams
MKDOCS_PACKAGES := mkdocs-material==9.8.2 pymdown-extensions==13.1.2 markdown==3.11.3

docs-site: .venv/.installed ## build the documentation as a website into build/site; broken links fail
	@NO_MKDOCS_2_WARNING=1 .uv/bin/uv tool run --quiet --from mkdocs==1.6.1 $(MKDOCS_PACKAGES:%=--with %) \
	  mkdocs build --strict

diagrams: ## draw the pictures of docs/images (needs Graphviz)
	@for file in docs/images/*.dot; do dot -Tsvg $$file -o $${file%.dot}.svg; done
