"""Lists of layers in twelve forms on three models: what became of their entries, and whether the
plan is what TensorRT for RTX's own network says. Needs no GPU.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import DETECTOR, RECOGNISER
from bisect_trt.imports.mapping import Status
from bisect_trt.imports.read import import_list
from bisect_trt.model.graph import Graph
from bisect_trt.model.lifted import load_source
from bisect_trt.runners.tensorrt.network import parsed_network
from fixtures.encoders import encoder_decomposed
from tests.imports.lists import lists_of

HEADER = "| model | list | entries | mapped | widened | refused | FP32 layers | as TensorRT | s |"


def rows_of(name: str, graph: Graph, folder: Path) -> list[str]:
    """The table's rows for one model."""
    rows = []
    floats = {layer.name for layer in graph.layers}
    for given in lists_of(graph.proto):
        path = given.write(folder)
        began = time.perf_counter()
        parser = partial(parsed_network, graph.proto)
        found = import_list(str(path), graph, name, parser=parser)
        seconds = time.perf_counter() - began
        counts = [len(found.rows), *(len(found.rows_of(status)) for status in Status)]
        wanted = given.kept & floats
        same = "yes" if found.plan.pinned == wanted else f"{len(found.plan.pinned ^ wanted)} differ"
        cells = (name, given.name, *counts, len(found.plan.pinned), same, f"{seconds:.1f}")
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


def main() -> str:
    """The table."""
    models = {"encoder": Graph(encoder_decomposed().model)}
    for name, path in (("PP-OCRv4 det", DETECTOR), ("PP-OCRv4 rec", RECOGNISER)):
        if path.exists():
            models[name] = load_source(path).graph
    lines = [HEADER, "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"]
    with TemporaryDirectory() as folder:
        for name, graph in models.items():
            lines += rows_of(name, graph, Path(folder))
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())
