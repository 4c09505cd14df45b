# Two commands do it all on a fresh machine: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .cache/demo
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test lint bench fixtures clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -e '.[dev,demo]'
	@touch $@

# The model and the photo travel inside packages: the ONNX file in rapidocr-onnxruntime, page.png in scikit-image.
$(DEMO)/page.npz: examples/ocr_page.py | $(VENV)/.ready
	@mkdir -p $(DEMO)/wheels
	$(PIP) download --no-deps -d $(DEMO)/wheels rapidocr-onnxruntime==1.4.4 scikit-image==0.25.2
	$(BIN)/python examples/ocr_page.py $(DEMO)/wheels $(DEMO)

demo: $(VENV)/.ready $(DEMO)/page.npz
	$(BIN)/bisect-trt run $(DEMO)/ch_PP-OCRv4_det_infer.onnx --input $(DEMO)/page.npz --requirement 'max_abs<=5e-2' --out reports/demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready $(DEMO)/page.npz
	$(BIN)/python -m benchmarks

fixtures: $(VENV)/.ready
	$(BIN)/python -m fixtures

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis reports/demo
