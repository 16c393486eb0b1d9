# Everything runs in .venv, which any target makes when it needs it: a bare machine needs make and Python >= 3.10.

PYTHON ?= python3
# Another version, or a wheel's path: make demo TORCH=torch==2.6.0
TORCH ?= torch==2.13.0
# Test processes, one thread each.
JOBS ?= 2
# Neighbours stay together, so that what a file's tests share is made once; who is done first takes from the other.
IN_PARALLEL = -n $(JOBS) --dist worksteal
# What pytest gets beside: make test ARGS='tests/ranges/test_session.py -k coarsen'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled as they are imported, since compiling all that is installed takes as long as installing it. They are kept
# even where the caller's settings say otherwise: every process that a test starts would compile torch anew, two seconds each time.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --no-compile --quiet --no-input --disable-pip-version-check

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.package ## train a small language model with the inspector on, then in FP16 with and without loss scaling
	$(BIN)/mpinspect demo --curves

.PHONY: test
test: $(VENV)/.dev $(VENV)/.js ## run the tests, the README's and the docs' code among them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(IN_PARALLEL) --assert=plain $(ARGS) || { $(EXPLAINED); exit 1; }

# pytest needs half a minute in each process to rewrite the assertions, so only those that failed are run with their values.
EXPLAINED := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures=none $(ARGS)

# What starts no process and trains no network: pure functions, records, reports.
QUICK := tests/numeric tests/project/test_architecture.py tests/run/test_run_report.py tests/training/test_suggestions.py \
	$(addprefix tests/counting/test_,apart.py magnitude.py) \
	$(addprefix tests/kernels/test_,kernel_names.py kernel_report.py kernel_report_findings.py kernel_report_forms.py \
		trace_file_attribution.py trace_file_bad_input.py) \
	$(addprefix tests/ranges/test_,analysis_findings.py analysis_loss_scale.py analysis_noise.py analysis_serving.py \
		reports_json.py reports_tables.py reports_text.py session.py tensor_columns.py) \
	$(addprefix tests/runtime/test_,background.py decoding.py gpus.py) \
	$(addprefix tests/shapes/test_,matmul_meta.py matmul_ops.py shape_findings.py shape_reports.py shape_rules.py)

.PHONY: quick
quick: $(VENV)/.dev ## the tests that start no process and train nothing: within a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(IN_PARALLEL) -q $(QUICK) $(ARGS)

# torch and oneDNN choose their kernels by the processor, and nothing here may rest on one.
ARITHMETIC := tests/runtime/test_emulation.py tests/runtime/test_bit_identity.py tests/ranges/test_probe.py

.PHONY: test-processors
test-processors: .test-avx2 .test-sse ## the arithmetic's tests again, with older processors' instructions and other numbers of threads

# One process each: make --jobs=2 runs both at a time.
.PHONY: .test-avx2
.test-avx2: $(VENV)/.dev
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(ARITHMETIC)

.PHONY: .test-sse
.test-sse: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q $(ARITHMETIC)

# dist is for a release: it builds in environments of its own and trains the demo again, which the tests do too.
.PHONY: check
check: $(VENV)/.dev ## all that CI runs: lint, docs, test-processors, test
	$(MAKE) --jobs=5 --output-sync=target test-processors lint docs $(VENV)/.js
	$(MAKE) test

.PHONY: lint
lint: $(VENV)/.dev ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: docs
docs: $(VENV)/.dev ## build the documentation site, offline, warnings as errors, into build/docs
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs build/docs
	@echo "build/docs/index.html opens in a browser"

# What a package index gets, and what somebody gets from there: the wheel alone in an environment that borrows its dependencies from
# .venv (a .pth file within a borrowed folder is not followed, so the editable install is out of sight), run where no checkout is.
OUTSIDE := build/outside
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: dist
dist: $(VENV)/.dev ## build wheel and sdist into dist, check their metadata, install the wheel in a clean environment and run it
	rm -rf dist build/lib $(OUTSIDE)
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m venv $(OUTSIDE)/venv
	$(BIN)/python -c '$(SITE)' > "$$($(OUTSIDE)/venv/bin/python -c '$(SITE)')/borrowed.pth"
	$(OUTSIDE)/venv/bin/python -m pip install --quiet --no-deps --no-index dist/*.whl
	printf 'import torch\n\nmodel = torch.nn.Linear(64, 8)\n' > $(OUTSIDE)/model.py
	cd $(OUTSIDE) && unset PYTHONPATH && export PATH="$$PWD/venv/bin:$$PATH" && \
		python -c 'import mpinspect; print(mpinspect.__file__); assert "outside" in mpinspect.__file__' && \
		mpinspect demo --quiet --steps 5 --log-dir demo && mpinspect report demo --html report.html --png report.png && \
		grep -q '<script' report.html && mpinspect lint model.py:model --input 64,64 && \
		python -c 'import mpinspect, torch, model; print(mpinspect.probe(model.model, lambda m, x: m(x).norm(), [torch.ones(4, 64)]))'

.PHONY: format
format: $(VENV)/.dev ## let ruff format the code and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(VENV)/.bench ## run every benchmark and renew docs/performance.md (ARGS=--quick, or ARGS='counting overhead')
	$(BIN)/python benchmarks/run_all.py $(ARGS)

.PHONY: gallery
gallery: $(VENV)/.dev ## run broken and healthy scripts (examples/faults) and print which faults are named (ARGS=--peers: other tools too)
	OMP_NUM_THREADS=1 $(BIN)/python examples/faults/gallery.py --check --page docs/diagnoses.md $(ARGS)
	$(BIN)/python examples/faults/sentences.py docs/sentences.md

# Beside torch for CUDA, what the tests and benchmarks of a GPU import. numba is left out: it is larger than the rest together.
GPU_PACKAGES := numpy rich pytest hypothesis ml_dtypes
# The Python of the machine with the GPU.
GPU_PYTHON ?= 3.12

.PHONY: gpu
gpu: ## on a machine with a CUDA GPU: its tests and benchmarks, in nine minutes, into OUT=DIR (ARGS=--rehearse: on a CPU)
	$(PYTHON) benchmarks/gpu.py $(if $(OUT),--out '$(OUT)') $(ARGS)

.PHONY: gpu-wheels
gpu-wheels: ## download what a machine with a GPU and no network may lack beside torch, into gpu-wheels (some 20 MB)
	rm -rf gpu-wheels
	$(PYTHON) -m pip download --quiet --no-input --disable-pip-version-check --dest gpu-wheels --only-binary=:all: \
		--implementation cp --python-version $(GPU_PYTHON) --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 $(GPU_PACKAGES)
	@du -sh gpu-wheels

# TensorFlow, JAX and Paddle ask for different versions of what they share: each has an environment of its own.
FRAMEWORKS := tensorflow jax paddle
tensorflow_PACKAGES := tensorflow-cpu
jax_PACKAGES := jax
paddle_PACKAGES := paddlepaddle

.PHONY: test-frameworks
test-frameworks: $(FRAMEWORKS:%=.test-%) ## run the recorder's tests and examples under TensorFlow, JAX and Paddle (CPU packages, some GB)

.PHONY: $(FRAMEWORKS:%=.test-%)
$(FRAMEWORKS:%=.test-%): .test-%: .venv-%/.ready
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest framework_tests/test_$*_arrays.py framework_tests/test_digits_examples.py $(ARGS)

.PHONY: test-versions
test-versions: ## the tests on the oldest and the newest torch and Python, in environments of their own (some GB; ARGS='--only oldest')
	$(PYTHON) tests/versions.py $(IN_PARALLEL) $(ARGS)

.PHONY: clean
clean: ## remove .venv, caches and build output (your runs stay)
	rm -rf $(VENV) $(FRAMEWORKS:%=.venv-%) .venv-oldest .venv-newest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mpinspect tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# -- set-up, once: a stamp per step, renewed when pyproject.toml changes ------------------------------------------------

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "mpinspect needs Python 3.10 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "venv is missing; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing $(TORCH) into $(VENV) (the first time this takes a few minutes)"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	@echo "installing mpinspect into $(VENV)"
	@$(PIP) -e .
	@touch $@

# Compiling what counts takes one core as long as installing the rest takes the other. Tests compile what is missing.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing mpinspect and what its tests and its documentation need into $(VENV)"
	@$(PIP) -e '.[cpu]'
	@$(BIN)/python -c 'from mpinspect.counting.fastest import warm_up; warm_up(compile_here=True)' & \
		$(PIP) -e '.[dev,docs]' && wait
	@touch $@ $(VENV)/.package

# TypeScript checks the types in the page's scripts, axe-core whether everyone can read the page. Without npm, or where no registry
# answers, those tests are skipped.
$(VENV)/.js: $(VENV)/.torch Makefile
	@command -v npm > /dev/null && npm install --prefix $(VENV)/js --silent --no-fund --no-audit typescript@5.9 axe-core@4 || \
		echo "TypeScript and axe-core are not installed: the page's scripts and its accessibility are not checked" >&2
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "installing what the benchmarks compare with into $(VENV)"
	@$(PIP) -e '.[dev,bench]'
	@touch $@

.venv-%/.ready: pyproject.toml
	@echo "installing torch, $($*_PACKAGES) and mpinspect into .venv-$* (this takes a few minutes)"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --no-input --disable-pip-version-check $(TORCH)
	@.venv-$*/bin/python -m pip install --quiet --no-input --disable-pip-version-check -e . $($*_PACKAGES) scikit-learn pytest
	@touch $@
