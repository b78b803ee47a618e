# `make help` lists what there is. Nothing but Python 3.11+, make and git is needed; the rest is set up.

ENGINE ?= vllm
PORT ?= 8080
STREAMERS ?= 1
DISPATCHERS ?= 1
REPLICAS ?= 1
SMALL_REPLICAS ?= 0
LOCAL_DIR ?= .local
DTYPE ?= auto
TEMPERATURE ?= 0.7
PLAN ?= free
TARGET ?= arm64

export OPENAI_BASE_URL OPENAI_API_KEY OPENAI_MODEL TRACE_STAGES

SYSTEM_PYTHON ?= python3
PYTHON := .cache/venv/dev/bin/python
ENGINE_ENVIRONMENT := $(if $(filter vllm,$(ENGINE)),vllm)

.DEFAULT_GOAL := help
.PHONY: help setup up down token functions check test test-model test-unit lock bench-path bench-fanout clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18
	@echo
	@echo "Variables of up: ENGINE=vllm|simulated|openai PORT STREAMERS DISPATCHERS REPLICAS SMALL_REPLICAS LOCAL_DIR"
	@echo "                 DTYPE TEMPERATURE; for openai: OPENAI_BASE_URL OPENAI_MODEL OPENAI_API_KEY"

setup: ## make the environments that ENGINE needs
	@$(SYSTEM_PYTHON) scripts/setup.py dev ministack $(ENGINE_ENVIRONMENT)
	@if [ "$(ENGINE)" = vllm ]; then HF_HUB_OFFLINE=1 .cache/venv/vllm/bin/python scripts/convert_model.py; fi

up: setup ## set everything up and start the service
	@$(PYTHON) -m stacks.local.up --local-dir $(LOCAL_DIR) --port $(PORT) --engine $(ENGINE) \
	  --streamers $(STREAMERS) --dispatchers $(DISPATCHERS) --replicas $(REPLICAS) \
	  --small-replicas $(SMALL_REPLICAS) --dtype $(DTYPE) --temperature $(TEMPERATURE)

down: ## stop the service; its data stays in LOCAL_DIR
	@$(PYTHON) -m stacks.local.up --down --local-dir $(LOCAL_DIR)

token: ## print a token: make -s token USER=ada PLAN=plus
	@$(PYTHON) -m stacks.local.sign_in --local-dir $(LOCAL_DIR) "$(USER)" "$(PLAN)"

functions: ## build the Lambda zips for TARGET=arm64|x86_64|local
	@$(PYTHON) scripts/build_functions.py --target $(TARGET)

check: ## linters, types, import rules
	@$(MAKE) -s setup ENGINE=none
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.cache/venv/dev/bin/lint-imports

test: setup ## unit, infra, contract, integration, browser, end to end; the real engine by itself
	$(PYTHON) -m pytest -m "not model_service"

test-model: setup ## the whole service with the real engine: minutes, and a figure for each promise
	$(PYTHON) -m pytest -m model_service

test-unit: ## the tests that start nothing
	@$(MAKE) -s setup ENGINE=none
	$(PYTHON) -m pytest tests/unit tests/infra tests/contract

lock: ## write requirements/*.txt again
	$(SYSTEM_PYTHON) scripts/lock.py

bench-path: setup ## what the whole path adds to the model -> docs/performance/path.md
	@$(PYTHON) scripts/bench_path.py

bench-fanout: ## following 2,000 replies through one streamer -> docs/performance/fanout.md
	@$(MAKE) -s setup ENGINE=none
	@$(PYTHON) scripts/bench_fanout.py

clean: down ## remove the local data
	rm -rf $(LOCAL_DIR)
