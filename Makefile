# On a fresh machine with Python >= 3.10 and pip: `make demo` and `make test` set themselves up in .venv.
PYTHON ?= python3
BIN := .venv/bin
OTHER_TRITONS := .venv/triton-3.6 .venv/triton-3.8

.PHONY: demo test lint gpu-test bench readme clean

demo: .venv/demo
	$(BIN)/strobe demo

test: .venv/dev $(OTHER_TRITONS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto

gpu-test: .venv/dev
	$(BIN)/python -m pytest -m gpu

bench: .venv/dev
	$(BIN)/strobe bench

readme: .venv/dev
	$(BIN)/python -m strobe.lab.readme

.venv/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[demo]'
	touch $@

.venv/dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/demo

# The Gluon kernels are compiled on the oldest Triton that they support (3.8: Blackwell's) as well as on the one installed.
.venv/triton-%: .venv/dev
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target $@ 'triton==$*.*'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
