# Two commands do it all on a fresh machine: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .cache/demo
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-all fuzz cases docs dist gpu-test gpu-fuzz gpu-bench lint bench bench-large assets fixtures notebook clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -e '.[dev,demo]'
	@touch $@

# The model and the photo travel inside packages: the ONNX file in rapidocr-onnxruntime, page.png in scikit-image.
$(DEMO)/page.npz: examples/ocr_page.py | $(VENV)/.ready
	@mkdir -p $(DEMO)/wheels
	$(PIP) download --no-deps -d $(DEMO)/wheels rapidocr-onnxruntime==1.4.4 scikit-image==0.25.2
	$(BIN)/python examples/ocr_page.py $(DEMO)/wheels $(DEMO)

# Seven pages more, made with fonts, sizes and noise: one photo says little of the next.
$(DEMO)/pages/page_006.npz: examples/text_inputs.py | $(VENV)/.ready
	$(BIN)/python examples/text_inputs.py pages 7 $(DEMO)/pages > /dev/null

# The second command is the stricter one: `--weights nearest` leaves out an attempt that changes nothing here.
DEMO_RUN := bisect-trt run $(DEMO)/ch_PP-OCRv4_det_infer.onnx --input $(DEMO)/page.npz --input $(DEMO)/pages
demo: $(VENV)/.ready $(DEMO)/page.npz $(DEMO)/pages/page_006.npz
	$(BIN)/$(DEMO_RUN) --out reports/demo
	@echo "Stricter, no pixel off by more than 0.05: $(BIN)/$(DEMO_RUN) --requirement 'max_abs<=5e-2' --weights nearest --out reports/stricter"

# Minutes on two cores. CI asks for coverage, of both together: `make test test-all COVERAGE=1`.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal $(if $(COVERAGE),--cov --cov-report= --cov-fail-under=0)
test: $(VENV)/.ready $(DEMO)/page.npz
	$(if $(COVERAGE),$(BIN)/python -m coverage erase)
	$(PYTEST) -m "not slow and not gpu"

# The rest: pages of the documentation, every hostile file, ONNX's own models, long searches.
test-all: $(VENV)/.ready $(DEMO)/page.npz
	$(PYTEST) $(if $(COVERAGE),--cov-append) -m "slow and not gpu"
	$(if $(COVERAGE),$(BIN)/python -m coverage report)

# Random networks for two hours on two cores, other ones each time; failures go to reports/fuzz.jsonl. FUZZ="--minutes 5" for less.
fuzz: $(VENV)/.ready
	$(BIN)/python -m tests.fuzz $(FUZZ)

# Public bug reports as small models: one table, an error where an answer is not the right one.
cases: $(VENV)/.ready
	$(BIN)/python -m benchmarks.reports

# Stubs of TensorRT 10 for the weakly typed path. Without their needs: those fetch TensorRT itself. The edits mend what is no Python in them.
STUBS := $(VENV)/stubs
$(STUBS)/.ready: | $(VENV)/.ready
	$(PIP) install --no-deps --target $(STUBS) tensorrt-stubs==10.13.0.35.1
	sed -i 's/self, in: /self, in_: /; s/\([(,] *\)in: /\1in_: /; s/channel_axis: int) -> IScaleLayer/channel_axis: int = 0) -> IScaleLayer/' $(STUBS)/tensorrt_bindings/tensorrt.pyi
	sed -i 's/^import tensorrt_libs.*//' $(STUBS)/tensorrt/__init__.pyi
	@touch $@

# On a machine with a GPU. The demo's models are tested too where `make demo` has fetched them.
gpu-test: $(VENV)/.ready
	$(BIN)/python -m pytest -m gpu tests/gpu

# 200 random networks as engines; lines go to reports/gpu-fuzz.jsonl, and a second run goes on. FUZZ="--processes 12" where there are cores.
gpu-fuzz: $(VENV)/.ready
	$(BIN)/python -m tests.fuzz.engines $(FUZZ)

gpu-bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.engines.engines

lint: $(VENV)/.ready $(STUBS)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(STUBS) $(BIN)/mypy

# The site, into build/site: it opens from the disk. What MkDocs warns of fails; NO_MKDOCS... silences Material's advertisement only.
$(VENV)/.docs: pyproject.toml | $(VENV)/.ready
	$(PIP) install -e '.[docs]'
	@touch $@

docs: $(VENV)/.ready $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs -q build --strict
	@echo "open build/site/index.html"

# The wheel, into dist/. The build fetches setuptools; tests/test_wheel.py says what the wheel holds.
dist: $(VENV)/.ready
	$(PIP) wheel --no-deps -w dist .

# What the benchmark holds the tool against, with the versions those need. Without it the benchmark says so and goes on.
PEERS := .cache/peers
$(PEERS)/.ready: benchmarks/requirements-peers.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check -q install -r $<
	@touch $@

# With OLD=CHECKOUT another version's tables of times stand beside ours.
bench: $(VENV)/.ready $(DEMO)/page.npz
	-$(MAKE) $(PEERS)/.ready
	$(BIN)/python -m benchmarks

# The libraries in the report, as npm has them; the versions are those of the page beside them. Nobody but who raises one needs npm.
ASSETS := bisect_trt/report/assets
assets:
	set -e; new() { npm pack --silent --pack-destination .cache $$1 | sed 's|^|.cache/|'; }; mkdir -p .cache; \
	version() { sed -n "s/^| $$1 |[^|]*| \\([0-9.]*\\) |.*/\\1/p" $(ASSETS)/NOTICE.md; }; \
	tar xzOf $$(new plotly.js-basic-dist-min@$$(version plotly-basic.min.js)) package/plotly-basic.min.js > $(ASSETS)/plotly-basic.min.js; \
	tar xzOf $$(new datatables.net@$$(version dataTables.min.js)) package/js/dataTables.min.js > $(ASSETS)/dataTables.min.js; \
	tar xzOf $$(new datatables.net-dt@$$(version dataTables.min.css)) package/css/dataTables.dataTables.min.css > $(ASSETS)/dataTables.min.css

# Models of gigabytes, for minutes; those that do not fit into the memory that is free are left out.
bench-large: $(VENV)/.ready
	$(BIN)/python -m benchmarks.sizes.large

fixtures: $(VENV)/.ready
	$(BIN)/python -m fixtures

# docs/notebook.ipynb with its outputs, executed here.
notebook: $(VENV)/.ready
	$(BIN)/python -m tests.executed_notebook

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis reports/demo
