# What a newcomer types. Each target says what it does, works from a clean clone, and works twice in a row.
# `make help` lists them. The work is in cargo and in scripts/.

.DEFAULT_GOAL := help
CARGO ?= cargo
PYTHON ?= python3
ARGS ?=
# The model's name, and the sampling that its card recommends for requests that say nothing.
MODEL_FLAGS = --model-name SmolLM2-135M-Instruct --temperature 0.2 --top-p 0.9

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

.PHONY: up
up: build ## fetch the model, build, and serve it here with prefill and decode in separate processes (ARGS='--aggregated')
	@model="$$($(PYTHON) scripts/fetch_model.py)" && towline="$$(scripts/target_dir.sh)/release/towline" && \
	  exec "$$towline" up --model "$$model" $(MODEL_FLAGS) $(ARGS)

.PHONY: model
model: ## fetch the model once and print its path
	@$(PYTHON) scripts/fetch_model.py

.PHONY: build
build: ## build the release binary, target/release/towline
	$(CARGO) build --release --locked -p towline

.PHONY: test
test: ## everything that CI checks, and a table of what could not be checked here
	@scripts/test.sh

.PHONY: lint
lint: ## formatting and clippy, warnings as errors
	@scripts/lint.sh

.PHONY: fmt
fmt: ## format the code
	$(CARGO) fmt --all

.PHONY: fuzz
fuzz: ## fuzz every decoder with cargo-fuzz on nightly, a minute each (ARGS='600 ticket frame'); `make test` runs the stable form
	@scripts/fuzz.sh $(ARGS)

.PHONY: sanitize
sanitize: ## loom, Miri and ThreadSanitizer, the last two on nightly, some minutes each (ARGS=miri); `make test` runs loom
	@scripts/sanitize.sh $(ARGS)

.PHONY: bench
bench: build ## the benchmarks, in release, with the real model: run on a quiet machine (docs/benchmarks.md)
	@model="$$($(PYTHON) scripts/fetch_model.py)" && export TOWLINE_MODEL="$$model" && \
	  for of in "towline-worker engine" "towline-fabric pull" "towline-router overhead"; do \
	    set -- $$of && $(CARGO) bench --locked -p "$$1" --bench "$$2" || exit 1; \
	  done && \
	  towline="$$(scripts/target_dir.sh)/release/towline" && \
	  "$$towline" bench kv --format json && "$$towline" bench kv --block 64KiB,4KiB --format json && \
	  scripts/bench_serving.py "$$towline" "$$model"
