"""Build scripts are read by their syntax; what is not understood is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import Listing
from bisect_trt.imports.mapping import ImportedList, Status, map_listing
from bisect_trt.imports.script import read_script
from bisect_trt.model.graph import Graph
from bisect_trt.model.trt_names import Network, TrtNames
from bisect_trt.runners.tensorrt.network import parsed_network
from fixtures.encoders import encoder_layernorm

GRAPH = Graph(encoder_layernorm().model)
NETWORK = parsed_network(GRAPH.proto, "tensorrt_rtx")[0]
NAMES = [layer.name for layer in GRAPH.layers]
NORMS = frozenset(layer.name for layer in GRAPH.layers if layer.op == "LayerNormalization")


def listing(script: str, network: Network | None = NETWORK) -> Listing:
    return read_script(script, "build.py", GRAPH, network)


def read(script: str, network: Network | None = NETWORK) -> ImportedList:
    return map_listing(listing(script, network), TrtNames(GRAPH, network), GRAPH, "build.py")


def loop(test: str) -> str:
    return f"for layer in network:\n    if {test}:\n        layer.precision = trt.float32\n"


def ending(*ends: str) -> frozenset[str]:
    return frozenset(name for name in NAMES if name.endswith(ends))


@pytest.mark.parametrize(
    ("test", "kept"),
    [
        ("layer.type == trt.LayerType.NORMALIZATION", NORMS),
        ("layer.type in {trt.LayerType.NORMALIZATION}", NORMS),
        ("layer.type.name == 'NORMALIZATION'", NORMS),
        ("str(layer.type).endswith('NORMALIZATION')", NORMS),
        ("getattr(layer, 'type') == getattr(trt.LayerType, 'NORMALIZATION')", NORMS),
        (f"layer.name == {NAMES[0]!r}", {NAMES[0]}),
        (f"layer.name in {NAMES[:3]!r}", set(NAMES[:3])),
        (f"layer.name in {{ {NAMES[0]!r}: 1 }}", {NAMES[0]}),
        ("layer.name.endswith(('/Softmax', '/Add'))", ending("/Softmax", "/Add")),
        ("any(layer.name.endswith(e) for e in ['/Softmax'])", ending("/Softmax")),
        ("any(e in layer.name.lower() for e in ('softmax', 'none'))", ending("/Softmax")),
        ("not all(c != 'S' for c in layer.name[-7:])", ending("/Softmax")),
        ("re.search(r'Soft.ax$', layer.name)", ending("/Softmax")),
        ("re.match(r'.*/Softmax', layer.name) is not None", ending("/Softmax")),
        ("re.compile('SOFTMAX', re.IGNORECASE).search(layer.name)", ending("/Softmax")),
        (
            "re.search('soft(max)', layer.name, re.I).group(1) if 'Soft' in layer.name else 0",
            ending("/Softmax"),
        ),
        ("layer.name.split('/')[-1] == 'Softmax'", ending("/Softmax")),
        ("(lambda n: n.endswith('Softmax'))(layer.name)", ending("/Softmax")),
        (
            "layer.name == f'/encoder/layers.{1}/attention/Softmax'",
            {"/encoder/layers.1/attention/Softmax"},
        ),
        ("'Softmax' in layer.metadata", ending("/Softmax")),
        ("layer.get_output(0).name == 'nothing'", set()),
        ("False and unknown_function(layer)", set()),
    ],
)
def test_the_usual_tests_of_layers(test: str, kept: set[str]) -> None:
    imports = "import re\nimport tensorrt as trt\n"
    if not kept:
        assert all(row.status is Status.REFUSED for row in read(imports + loop(test)).rows)
        return
    found = read(imports + loop(test))
    assert found.plan.pinned == kept
    assert found.rows_of(Status.REFUSED) == ()


@pytest.mark.parametrize(
    "test",
    [
        "layer.name in open('names.txt').read()",
        "layer.name in json.load(open('names.json'))",
        "layer.op == trt.ElementWiseOperation.POW",
        "getattr(layer, 'op', None) == trt.ElementWiseOperation.POW",
        "is_bad(layer)",
        "NAMES.get(layer.name)",
        "layer.get_input(0).name == 'x'",
        "layer.get_output(0).shape[0] == 1",
        "layer.name.endswith('a' * 1000000000)",
        "layer.name.endswith('%1000000000d' % 1)",
        "layer.name[0][5] == 'a'",
        "-layer.name == 1",
        "re.search('SOFTMAX', layer.name, flags=re.IGNORECASE)",
        "layer.name.split(sep='/')[-1] == 'Softmax'",
        "re.search('(([a-z]+)/?)+Z', layer.name)",
        "re.search('([a-z/.0-9]+)+Z', layer.name)",
    ],
)
def test_a_test_that_is_not_understood_is_named_with_its_line(test: str) -> None:
    script = loop(test) + loop("layer.type == trt.LayerType.NORMALIZATION")
    found = read(script)
    assert found.plan.pinned == NORMS
    (row,) = found.rows_of(Status.REFUSED)
    assert row.entry.line == 2 and row.said


def test_a_test_that_no_layer_decides_is_taken_and_said() -> None:
    script = (
        "def build(args):\n  network = builder.create_network(1)\n  if args.fp16:\n"
        "    for i in range(network.num_layers):\n      layer = network.get_layer(i)\n"
        "      if args.keep and layer.type == trt.LayerType.NORMALIZATION:\n"
        "        layer.precision = trt.float32\n"
        "  return builder.build_serialized_network(network, config)\n"
    )
    found = read(script)
    assert found.plan.pinned == NORMS
    assert "line 3: taken as it sets layers: args.fp16" in found.notes
    assert "line 6: taken as it sets layers: args.keep" in found.notes
    either = read(script.replace("args.keep and", "args.keep or"))
    assert [row.entry.line for row in either.rows_of(Status.REFUSED)] == [6]


def test_what_no_layer_needs_may_be_left_out() -> None:
    script = """
settings = {"a": [1]}
workspace = 4 * 1024 * 1024 * 1024
first = settings["b"][0]
config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
config.max_workspace_size = workspace + len(first)
"""
    found = read(script + loop("layer.type == trt.LayerType.NORMALIZATION"))
    assert found.plan.pinned == NORMS and found.rows_of(Status.REFUSED) == ()


def test_a_line_that_no_layer_reaches_is_named() -> None:
    jump = "for layer in network:\n    if is_bad(layer):\n        continue\n"
    script = jump + "    layer.precision = trt.float32\n" + loop("layer.name == 'nowhere'")
    found = read(script + loop("layer.type == trt.LayerType.NORMALIZATION"))
    assert found.plan.pinned == NORMS
    assert [row.entry.line for row in found.rows_of(Status.REFUSED)] == [2, 4, 7]
    assert found.rows[-2].said == "no layer of this model comes to this line"


def test_helpers_are_followed_and_the_rest_is_left_out() -> None:
    script = """
import tensorrt as trt
KEPT = ["/a"] + ["Softmax"]

class Builder:
    def is_kept(self, name):
        return False

def kept(name, ends=("Normalization",)):
    for end in (*KEPT, *ends):
        if name.endswith(end):
            return True
    return False

def pin(layer):
    layer.precision = trt.float32
    for i in range(layer.num_outputs):
        layer.set_output_type(i, trt.float32)

def main(path):
    logger = trt.Logger(trt.Logger.INFO)
    with trt.Builder(logger) as builder, builder.create_network() as network:
        count = 0
        for index, layer in enumerate(network):
            if not kept(layer.name):
                continue
            print(index, layer.name)
            pin(layer)
            count += 1
        logger.log(trt.Logger.INFO, f"{count} layers")

if __name__ == "__main__":
    main("m.onnx")
"""
    assert read(script).plan.pinned == NORMS | ending("Softmax")


def test_a_later_line_replaces_an_earlier_one() -> None:
    script = loop("True") + loop("layer.name.endswith('Softmax')").replace("32", "16")
    assert read(script).plan.pinned == frozenset(NAMES) - ending("Softmax")
    script = loop("True") + "for layer in network:\n    layer.reset_precision()\n"
    assert read(script).plan.pinned == frozenset()


def test_numbers_of_layers_are_said_and_need_the_parser() -> None:
    script = "for i in range(10, 30):\n    network.get_layer(i).precision = trt.float32\n"
    found = read(script)
    (row,) = found.rows
    assert row.status is Status.WIDENED and "number differently" in row.said
    (entry,) = listing(script, None).entries
    assert "needs TensorRT's parser" in entry.refused


def test_without_the_parser_types_are_those_of_operators() -> None:
    script = loop("layer.type == trt.LayerType.NORMALIZATION") + loop("'Softmax' in layer.name")
    assert read(script, None).plan.pinned == NORMS | ending("Softmax")


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    network.get_layer(0).precision = trt.float32\n",
        "def f(x):\n    f(x)\n    x.precision = trt.float32\nfor x in network:\n    f(x)\n",
        "for layer in layers_of(network):\n    layer.precision = trt.float32\n",
        loop("layer.name in [x for x in range(10**9)]"),
        "for x in network:\n    if 0:\n        pass\n"
        + "    elif 0:\n        pass\n" * 1000
        + "    x.precision = choose(x)\n",
        "".join(f"def f{i}(x):\n    f{i + 1}(x)\n" for i in range(3000))
        + "def f3000(x):\n    x.precision = trt.float32\nfor x in network:\n    f0(x)\n",
        loop("(" * 90 + "layer.name" + ")" * 90 + " in unknown"),
        "for layer in network:\n    layer.precision = choose(layer)\n",
    ],
)
def test_what_cannot_be_followed_is_refused_in_seconds(body: str) -> None:
    entries = listing("import tensorrt as trt\n" + body).entries
    assert entries and all(entry.precision is None and entry.refused for entry in entries)


FIRST, SECOND = NAMES[:2]


@pytest.mark.parametrize(
    "change",
    [
        "for line in open('f'):\n    keep.append(line.strip())\n",
        "keep.extend(json.load(open('f')))\n",
        f"keep.remove({SECOND!r})\n",
        f"keep.insert(0, {SECOND!r})\n",
        f"keep[0] = {SECOND!r}\n",
        "keep[1:] = []\n",
        "del keep[1]\n",
        "table = {}\nkeep.append(table['x'])\n",
        "keep.append(*names)\n",
        "i = 0\nwhile i < network.num_layers:\n"
        "    keep.append(network.get_layer(i).name)\n    i += 1\n",
        "keep += open('f').read().split()\n",
        "other = keep\nother.remove(keep[1])\n",
        "groups = {'a': keep}\ngroups['a'].remove(keep[1])\n",
        "def add(a, b):\n    a.append(b)\nfor line in open('f'):\n    add(keep, line)\n",
        "def drop():\n    keep.pop()\ndrop()\n",
        "def drop():\n    keep.pop()\nwhile more():\n    drop()\n",
        "def change():\n    global keep\n    keep = []\nchange()\n",
        "if args.more:\n    keep.append(args.more)\n",
        "if args.more:\n    keep = []\n",
        "keep.pop() if args.less else None\n",
        "args.less and keep.pop()\n",
        "[keep.append(line) for line in open('f')]\n",
        "{line: keep.append(line) for line in open('f')}\n",
        "for layer in network:\n    if is_bad(layer):\n        keep.append(layer.name)\n",
        "for layer in network:\n    if is_bad(layer):\n        continue\n    keep.pop()\n",
        "random.shuffle(keep)\n",
        "load_names('f', keep)\n",
        "add = keep.append\nfor line in open('f'):\n    add(line)\n",
        "f(x=keep.pop())\n",
        "config.f(x=keep.pop())\n",
        "groups = {'a': keep}\ngroups['a'] += ['x']\n",
        "match args.kind:\n    case 'a':\n        keep.pop()\n",
        "with open('f') as f:\n    for line in f:\n        keep.append(line)\n",
        "try:\n    keep += json.load(open('f'))\nexcept OSError:\n    pass\n",
    ],
)
def test_a_list_whose_change_cannot_be_followed_is_not_known(change: str) -> None:
    begin = f"keep = [{FIRST!r}, {SECOND!r}]\n{change}"
    script = begin + loop("layer.name in keep") + loop(f"layer.name == {NAMES[2]!r}")
    found = read(script)
    assert found.plan.pinned == {NAMES[2]}
    row = found.rows_of(Status.REFUSED)[-1]
    assert row.said == "tests what is not known here: layer.name in keep"
    assert row.entry.line == script[: script.rindex("in keep")].count("\n") + 1


@pytest.mark.parametrize(
    "change",
    [
        f"keep.append({SECOND!r})\n",
        f"keep += [{SECOND!r}]\n",
        f"other = keep\nother += [{SECOND!r}]\n",
        f"def add(names):\n    names += [{SECOND!r}]\nadd(keep)\n",
        f"def add(name):\n    keep.append(name)\nadd({SECOND!r})\n",
        f"groups = {{}}\ngroups['a'] = keep\ngroups['a'].append({SECOND!r})\n",
        f"for name in open('f'):\n    print(name)\nkeep.append({SECOND!r})\n",
        f"try:\n    import x\nexcept ImportError:\n    keep = []\nkeep.append({SECOND!r})\n",
        f"print(keep)\nlogger.info(keep)\nkeep.append({SECOND!r})\n",
        f"keep.remove('a')\nkeep = [{FIRST!r}, {SECOND!r}]\n",
    ],
)
def test_a_list_whose_changes_are_followed_is_known(change: str) -> None:
    found = read(f"keep = [{FIRST!r}]\n{change}" + loop("layer.name in keep"))
    assert found.plan.pinned == {FIRST, SECOND}
    assert found.rows_of(Status.REFUSED) == ()


@pytest.mark.parametrize(
    "body",
    [
        "    for line in open('f'):\n        if name == line:\n            return True\n",
        "    if path.exists(name):\n        return True\n",
    ],
)
def test_a_function_that_may_return_earlier_gives_what_is_not_known(body: str) -> None:
    script = f"def kept(name):\n{body}    return False\n"
    names = "names = [x.name for x in network if not kept(x.name)]\n"
    assert read(script + names + loop("layer.name in names")).plan.pinned == set()


@pytest.mark.parametrize(
    "line",
    [
        "x = 5 % 0\n",
        "d = {1: 1}\nx = [d.update({k + 1: 1}) for k in d]\n",
        "d = {}\nd[[1]] = 2\n",
        "x = re.compile('(?P<a', re.VERBOSE)\n",
        "x = b'%1000000000d' % 1\n",
        "x = f(" + "a" + ".b" * 2500 + ")\n",
        "x = a" + ".b" * 2500 + "()\n",
        "a" + ".b" * 2500 + " = 1\n",
    ],
)
def test_errors_of_the_script_are_left_out_where_no_layer_needs_them(line: str) -> None:
    found = read("import re\n" + line + loop(f"layer.name == {FIRST!r}"))
    assert found.plan.pinned == {FIRST} and found.rows_of(Status.REFUSED) == ()


def test_an_error_ends_a_turn() -> None:
    body = f"        if layer.name == {FIRST!r}: raise KeyError\n"
    script = f"for layer in network:\n    try:\n{body}        layer.precision = trt.float32\n"
    found = read(script + "    except KeyError: pass\n")
    assert found.plan.pinned == set(NAMES[1:])
    assert [(row.entry.line, row.said) for row in found.rows_of(Status.REFUSED)] == [
        (3, "raises an error")
    ]
    found = read(
        script.replace("if", "assert").replace(": raise KeyError", "") + "    finally: 1\n"
    )
    assert found.plan.pinned == {FIRST}


CLASS = f"""
class Builder:
    def pin(self, network, name={FIRST!r}):
        for layer in network:
            if layer.name == name:
                layer.precision = trt.float32
"""


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        ("b = Builder()\nb.pin(network)\n", {FIRST}),
        (f"Builder().pin(network, {SECOND!r})\n", {SECOND}),
        (f"Builder.pin(b, network, {SECOND!r})\n", {SECOND}),
        (f"Builder().pin(network, name={SECOND!r})\n", {SECOND}),
        ("    def build(self, network):\n        self.pin(network)\n", {FIRST}),
        ("    def build(self):\n        self.pin(self.network)\n", {FIRST}),
        (
            "    @staticmethod\n    def also(network):\n"
            f"        for layer in network:\n            if layer.name == {FIRST!r}:\n"
            f"                layer.precision = trt.float32\nBuilder.also(network)\n"
            f"b.pin(network, {SECOND!r})\n",
            {FIRST, SECOND},
        ),
        (
            f"class Other:\n    def pin(self, network):\n        self.x = 1\n"
            f"    def build(self, network):\n        self.pin(network)\n{CLASS}"
            "    def make(self, network):\n        self.pin(network)\n",
            {FIRST},
        ),
    ],
)
def test_methods_are_followed(rest: str, kept: set[str]) -> None:
    found = read(CLASS + rest)
    assert found.plan.pinned == kept


def test_a_method_of_more_than_one_class_is_refused() -> None:
    found = read(CLASS + CLASS.replace("Builder", "Other") + "b.pin(network)\n" + loop("True"))
    assert "calls pin(), which more than one class here has" in [row.said for row in found.rows]


def test_why_a_line_is_not_reached_is_true() -> None:
    script = CLASS + "if False:\n    Builder().pin(network)\n" + loop(f"layer.name == {FIRST!r}")
    (row,) = read(script).rows_of(Status.REFUSED)
    assert row.said == "no call of pin() could be followed"


def test_functions_that_call_each_other_are_read_once() -> None:
    names = [f"f{i}" for i in range(60)]
    calls = "".join(f"    {name}(x)\n" for name in names)
    script = "".join(f"def {name}(x):\n{calls}" for name in names)
    script = f"keep = [{FIRST!r}]\nlast = [{FIRST!r}]\n{script}    x.pop()\n"
    found = read(f"{script}while more():\n    f0(keep)\n{loop('layer.name in keep')}")
    assert found.plan.pinned == set()
    found = read(f"{script}while more():\n    f0(keep)\n{loop('layer.name in last')}")
    assert found.plan.pinned == {FIRST}


def test_too_many_tests_are_refused_with_the_line() -> None:
    with pytest.raises(BadInputError, match=r"build\.py: line 2: too many tests to read"):
        listing(loop("any(n in layer.name for n in [str(i) for i in range(99999)])"))


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    script = f"open({str(made)!r}, 'w')\n__import__('os').system('touch {made}')\n"
    read(script + loop("layer.type == trt.LayerType.NORMALIZATION"))
    assert not made.exists()


def test_the_base_and_the_constraints_are_the_builder_s() -> None:
    script = "config.set_flag(trt.BuilderFlag.BF16)\n" + loop("True")
    assert listing(script).base is Precision.BF16
    assert "without OBEY_PRECISION_CONSTRAINTS" in " ".join(listing(script).notes)
    assert "FP16 is taken" in " ".join(listing(script + "trt.BuilderFlag.FP16\n").notes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("def (", "no Python"), ("x = 1\n", "no layer.precision or set_output_type")],
)
def test_other_texts_are_refused(text: str, reason: str) -> None:
    with pytest.raises(BadInputError, match=reason):
        listing(text)
