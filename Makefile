# On a fresh machine with Python >= 3.10 and pip: `make demo` and `make test` set themselves up in .venv.
PYTHON ?= python3
BIN := .venv/bin
OTHER_TRITONS := .venv/triton-3.6 .venv/triton-3.8

.PHONY: demo test types tests test-all gpu-test bench readme lab site clean

demo: .venv/demo
	$(BIN)/strobe demo

test: .venv/dev $(OTHER_TRITONS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) -j2 types tests

# Beside the tests, as it uses one core.
types:
	$(BIN)/mypy

# A file's tests run in one process, so that what they compile is compiled once.
tests:
	$(BIN)/python -m pytest -n auto --dist loadfile

# `test`, then the campaigns: every kernel in every order of the simulator, every family of models, mutants, the long fuzz.
test-all: test
	$(BIN)/python -m pytest -n auto -m exhaustive

gpu-test: .venv/dev
	$(BIN)/python -m pytest -m gpu

bench: .venv/dev
	$(BIN)/strobe bench

readme: .venv/dev
	$(BIN)/python -m strobe.lab.pages.readme

# The documents as a site, in build/site; a broken link is an error.
site: .venv/docs
	$(BIN)/python -m mkdocs build --strict

# The pictures, JSON and report of docs/lab.md: compiled or simulated here, from what was measured on an H200.
MEASURED := benchmarks/results/forward-h200-2026-11-22.json
WALK := --head-dims 64,128 --mask full --json docs/lab
lab: .venv/dev
	$(BIN)/strobe roofline --report $(MEASURED) --head-dims 64,128,256 --lengths 1024,4096,16384 --out docs/roofline.png
	$(BIN)/strobe occupancy --arch H200 --head-dims 128 --out docs/occupancy.png
	$(BIN)/strobe banks --layouts none,padded,xor,nvmma128 --accesses rows,ldmatrix,fragment,column --out docs/banks.png
	$(BIN)/strobe profile --report docs/lab/profile-h200.json --out docs/profile.png
	$(BIN)/strobe bench compare benchmarks/results/forward-h200-2026-11-21.json $(MEASURED) --out docs/compare.png
	$(BIN)/strobe timeline --simulate --head-dims 128 --mask full --length 2048 \
	  --json docs/lab/timeline-simulated.json --perfetto docs/lab/perfetto.json
	rm docs/lab/timeline-simulated.png
	$(BIN)/strobe roofline --report $(MEASURED) --lengths 16384 $(WALK)/roofline.json
	$(BIN)/strobe roofline --context-parallel --json docs/lab/context-parallel.json --out docs/parallel.png
	$(BIN)/strobe occupancy --arch H200 --backends sm90 --length 16384 $(WALK)/occupancy.json
	$(BIN)/strobe audit sm90-forward --length 16384 $(WALK)/audit.json
	$(BIN)/strobe ladder run --rungs 1-18 --device cpu --json docs/lab/ladder-compiled.json
	$(BIN)/strobe banks --tile 128x64 --layouts none,nvmma128 --accesses rows,ldmatrix --json docs/lab/banks.json
	$(BIN)/strobe report $(addprefix docs/lab/, roofline.json occupancy.json audit.json banks.json) \
	  benchmarks/results/timeline-h200-2026-11-22.json --out docs/lab/report.html
	$(BIN)/python -m strobe.lab.pages.shown

.venv/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[demo]'
	touch $@

.venv/dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/demo

.venv/docs: .venv/dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[docs]'
	touch $@

# The Gluon kernels are compiled on the oldest Triton that they support (3.8: Blackwell's) as well as on the one installed.
.venv/triton-%: .venv/dev
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target $@ 'triton==$*.*'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
