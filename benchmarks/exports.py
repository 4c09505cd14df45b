"""What other converters make of the lists that `export` writes: ``python -m benchmarks.exports``.

It needs ``.cache/peers`` (the Makefile's), or the path of a Python with nvidia-modelopt[onnx],
onnxruntime and onnxconverter-common as its argument. Each converter's model is read back by type
and compared with the plan. Nothing needs a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort

from benchmarks.common import CLASSIFIER, DETECTOR, RECOGNISER, RESULTS, machine, table
from benchmarks.peers.peers import PYTHON
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.block_lists import BLOCK_LISTS
from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT
from fixtures.encoders import encoder_decomposed, encoder_layernorm
from fixtures.subgraphs import branch, loop

_WORKER = Path(__file__).parent / "peers" / "export_worker.py"
_TOOLS = {"autocast": "autocast", "transformers": "onnxruntime", "common": "onnxruntime"}
"""The converters, and the form of list that each takes."""
_HEAD = (
    "model", "plan", "converter", "layers", "kept", "reduced though kept", "kept though reduced",
    "gone", "rounded inputs", "loads",
)  # fmt: skip

_WORDS = """
A plan is carried to two lists: AutoCast's, and that of ONNX Runtime's transformers and
onnxconverter-common. Each converter then runs on the CPU, and its model is read back by type.

- *kept*: layers that the plan keeps in FP32.
- *reduced though kept*: of them, those whose output the converter made FP16.
- *kept though reduced*: layers that the plan reduces and the converter left in FP32.
- *gone*: layers that are not in the converter's model. AutoCast merges LayerNorms first.
- *rounded inputs*: tensors and constants that kept layers read in FP32 by the plan, and that
  the converter rounds to FP16 on the way.
- *loads*: whether ONNX Runtime's CPU provider makes a session of it.

Plans are made for the test: every fourth layer, the matrix layers, or those with bodies.

What it shows:

- All converters keep the layers of the list and reduce the others. AutoCast leaves an If in FP32.
- ONNX Runtime's transformers may round a tensor between two kept layers. The plan does not.
- It and onnxconverter-common round Constant nodes of kept layers. So `export` refuses those; the
  Constant nodes of the PP-OCR models were made initialisers first.
- AutoCast merges LayerNorms. The list names the merged ones where a part is kept.
- onnxconverter-common gives Resize a scale in FP16. Add "Resize" to `op_block_list` there.
- A list that cannot be carried is refused, with the layer's name.
"""


@dataclass(frozen=True)
class ReadBack:
    """What a converter's model is beside the plan: names of layers, and the tensors between."""

    reduced: tuple[str, ...]
    kept: tuple[str, ...]
    gone: tuple[str, ...]
    rounded: tuple[str, ...]


def read_back(source: Graph, plan: PrecisionPlan, converted: onnx.ModelProto) -> ReadBack:
    """Compares the types in ``converted`` with ``plan``, a plan for ``source``."""
    del converted.graph.value_info[:]  # converters leave old types there
    made = Graph(converted)
    nodes = {node.name: node for node in converted.graph.node}
    low = {
        name
        for name, node in nodes.items()
        if any(made.types.type_of(o) == onnx.TensorProto.FLOAT16 for o in node.output)
    }
    layers = [layer.name for layer in source.layers_at(plan.base)]
    return ReadBack(
        tuple(name for name in layers if name in low & plan.pinned),
        tuple(n for n in layers if n in nodes and n not in low and n not in plan.pinned),
        tuple(name for name in layers if name not in nodes),
        tuple(_rounded(source, plan, made)),
    )


def _rounded(source: Graph, plan: PrecisionPlan, made: Graph) -> Iterator[str]:
    """The constants of kept layers, and tensors between them, that ``made`` rounds by Casts."""
    makers = {o: node for node in made.proto.graph.node for o in node.output}
    readers = {node.name: node for node in made.proto.graph.node}
    kept = {o: n for node, n in source.named_nodes() for o in node.output if n in plan.pinned}
    for node, name in source.named_nodes():
        if name not in plan.pinned or name not in readers:
            continue
        for slot, tensor in enumerate(node.input):
            inner = tensor in kept or tensor in source.float_constants
            if not inner or source.types.type_of(tensor) != FLOAT:
                continue
            at, rounds, end = readers[name].input[slot], False, kept.get(tensor)
            while at in makers and makers[at].op_type == "Cast" and makers[at].name != end:
                rounds |= made.types.type_of(at) == onnx.TensorProto.FLOAT16
                at = makers[at].input[0]
                rounds |= made.types.type_of(at) == onnx.TensorProto.FLOAT16
            if rounds:
                yield tensor


def _plans(graph: Graph) -> Iterator[tuple[str, PrecisionPlan]]:
    layers = graph.layers_at(Precision.FP16)
    yield "every fourth", PrecisionPlan(Precision.FP16, frozenset(x.name for x in layers[::4]))
    matrices = frozenset(x.name for x in layers if Precision.TF32 in x.precisions)
    yield "matrix layers", PrecisionPlan(Precision.FP16, matrices)
    if bodies := frozenset(x.name for x in layers if x.op in CONTROL_FLOW):
        yield "If and Loop", PrecisionPlan(Precision.FP16, bodies)


def _models(folder: Path) -> Iterator[Path]:
    for fixture in (encoder_decomposed(), encoder_layernorm(), branch(), loop()):
        path = folder / f"{fixture.name}.onnx"
        onnx.save(fixture.model, path)
        yield path
    for source in (CLASSIFIER, RECOGNISER, DETECTOR):
        if source.exists():
            path = folder / source.name
            onnx.save(_with_initialisers(onnx.load(source)), path)
            yield path


def _with_initialisers(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with initialisers for its Constant nodes."""
    graph = model.graph
    constants = [node for node in graph.node if node.op_type == "Constant"]
    for node in constants:
        (value,) = (a.t for a in node.attribute if a.name == "value")
        graph.initializer.add().CopyFrom(value)
        graph.initializer[-1].name = node.output[0]
        graph.node.remove(node)
    return model


def _loads(path: Path) -> str:
    try:
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises classes of its own
        return f"no: {str(error).partition('Type Error: ')[2].strip()[:110]}"
    return "yes"


def _row(
    python: str, tool: str, model: Path, graph: Graph, name: str, plan: PrecisionPlan, folder: Path
) -> tuple[tuple[object, ...], str]:
    """A row of the table, and the converter's version."""
    layers = len(graph.layers_at(Precision.FP16))
    head = (model.stem, name, tool, layers, len(plan.pinned))
    arguments, converted = folder / "list.json", folder / "converted.onnx"
    try:
        arguments.write_text(BLOCK_LISTS[_TOOLS[tool]](graph, plan))
    except BadInputError as error:
        return (*head, "-", "-", "-", "-", f"refused: {str(error).partition(';')[0]}"), ""
    command = [python, str(_WORKER), tool, str(model), str(arguments), str(converted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1][:110]
        return (*head, "-", "-", "-", "-", f"no model: {last}"), ""
    found = read_back(graph, plan, onnx.load(converted))
    counts = tuple(len(names) for names in vars(found).values())
    return (*head, *counts, _loads(converted)), f"{tool} {done.stdout.strip().splitlines()[-1]}"


def main() -> None:
    """Convert everything and write ``results/exports.md``."""
    python = sys.argv[1] if len(sys.argv) > 1 else str(PYTHON)
    rows, versions = [], dict[str, None]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in _models(folder):
            graph = Graph(onnx.load(model))
            for name, plan in _plans(graph):
                for tool in _TOOLS:
                    row, said = _row(python, tool, model, graph, name, plan, folder)
                    rows.append(row)
                    versions |= {said: None} if said else {}
                    print(*row, flush=True)
    text = [
        "# Lists for other converters",
        "",
        f"`python -m benchmarks.exports`, {machine()}; {', '.join(versions)}",
        _WORDS,
        *table(_HEAD, rows),
    ]
    (RESULTS / "exports.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
