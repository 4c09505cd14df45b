"""AutoCast's, onnxconverter-common's and ONNX Runtime's lists, and polygraphy's replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import Form
from bisect_trt.imports.mapping import ImportedList, Status
from bisect_trt.imports.matching import matched
from bisect_trt.imports.read import import_list
from bisect_trt.model.graph import Graph
from bisect_trt.model.trt_names import Network, NetworkLayer
from fixtures.encoders import encoder_layernorm

GRAPH = Graph(encoder_layernorm().model)
NAMES = [layer.name for layer in GRAPH.layers]


def of(*operators: str) -> set[str]:
    return {layer.name for layer in GRAPH.layers if layer.op in operators}


def read(tmp_path: Path, file: str, text: str, network: Network | None = None) -> ImportedList:
    (tmp_path / file).write_text(text)
    return import_list(
        str(tmp_path / file), GRAPH, "m.onnx", parser=lambda: (network, "no TensorRT here")
    )


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.sh", "python -m modelopt.onnx.autocast --op_types_to_exclude Softmax Add --x 1\n"),
        ("a.sh", "autocast \\\n --op_types_to_exclude=Softmax \\\n --op_types_to_exclude Add\n"),
        ("a.json", '{"op_types_to_exclude": ["Softmax", "Add"]}'),
        ("a.py", "convert_to_mixed_precision('m', op_types_to_exclude=['Softmax', 'Add'])\n"),
        ("a.json", '{"op_block_list": ["Softmax", "Add"]}'),
        ("a.sh", "python -m convert --op_block_list Softmax Add --node_block_list\n"),
        ("a.py", "m = convert_float_to_float16(m, op_block_list=['Softmax', 'Add'])\n"),
        ("a.py", "OPS = ['Softmax']\nm.convert_float_to_float16(op_block_list=OPS + ['Add'])\n"),
    ],
)
def test_lists_of_operators(file: str, text: str, tmp_path: Path) -> None:
    assert read(tmp_path, file, text).plan.pinned == of("Softmax", "Add")


def test_names_are_expressions_for_autocast_and_names_elsewhere(tmp_path: Path) -> None:
    begin = "/encoder/layers.0/"
    found = read(tmp_path, "a.json", json.dumps({"nodes_to_exclude": [f"{begin}.*"]}))
    assert found.plan.pinned == {name for name in NAMES if name.startswith(begin)}
    found = read(tmp_path, "a.json", json.dumps({"nodes_to_exclude": [r".*Soft[m]ax$"]}))
    assert found.plan.pinned == of("Softmax")
    found = read(tmp_path, "a.json", json.dumps({"node_block_list": [NAMES[0], f"{begin}.*"]}))
    assert found.plan.pinned == {NAMES[0]}
    assert found.rows[1].said == "no node has this name"


@pytest.mark.parametrize("text", ["(/?[a-z0-9./]+)+Z", "(.|.)+Z$", "((.+))+Z", f"{'.*' * 20}Z"])
def test_an_expression_that_does_not_end_is_refused(text: str, tmp_path: Path) -> None:
    lists = json.dumps({"nodes_to_exclude": [text, f"{NAMES[0]}$|-"]})
    found = read(tmp_path, "a.json", lists)
    (row,) = found.rows_of(Status.REFUSED)
    assert row.entry.text == text and "does not end in 1 s" in row.said
    assert found.plan.pinned == {NAMES[0]}


def test_expressions_have_some_seconds_together() -> None:
    slow = [f"(a|a)+{i}" for i in range(12)]
    found = matched([*slow, "a+"], ["a" * 60], 0.2, 1.0)
    assert "does not end" in found[slow[0]] and "not tried" in found[slow[-1]]
    assert "not tried" in found["a+"]


def test_repeated_groups_that_end_are_matched() -> None:
    names = ["conv1/conv22/x", "conv", "b"]
    assert matched([r"(conv\d+/)+", "("], names) == {
        r"(conv\d+/)+": ("conv1/conv22/x",),
        "(": "no regular expression (missing ), unterminated subpattern at position 0)",
    }


def test_comments_of_a_shell_script_say_no_form_and_no_list(tmp_path: Path) -> None:
    text = (
        "# it's slow: trtexec --layerPrecisions='*:fp32'\n"
        "# autocast --nodes_to_exclude .* -t bf16\n"
        "autocast --op_types_to_exclude Softmax\n"
    )
    found = read(tmp_path, "a.sh", text)
    assert found.plan.base == "fp16" and found.plan.pinned == of("Softmax")


def test_what_autocast_includes_counts_before_what_it_excludes(tmp_path: Path) -> None:
    text = "autocast --nodes_to_include '.*layers.0.*' --op_types_to_exclude Softmax -t bf16"
    found = read(tmp_path, "a.sh", text)
    assert found.plan.pinned == {name for name in of("Softmax") if "layers.0" not in name}
    assert found.plan.base is Precision.BF16
    assert any("by its rules" in note for note in found.notes)


@pytest.mark.parametrize("given", ["", "op_block_list=float16.DEFAULT_OP_BLOCK_LIST + ['Add']"])
def test_defaults_are_those_that_the_model_has(given: str, tmp_path: Path) -> None:
    node = f"node_block_list=[{NAMES[0]!r}]"
    found = read(tmp_path, "a.py", f"m = convert_float_to_float16(m, {node}, {given})\n")
    assert found.plan.pinned == {NAMES[0]} | (of("Add") if given else set())
    assert found.rows_of(Status.REFUSED) == ()


CONVERT = "m = convert_float_to_float16(m, op_block_list=blocked)\n"


@pytest.mark.parametrize(
    "text",
    [
        f"blocked = ['Softmax']\nblocked.append('Add')\nblocked += []\n{CONVERT}",
        f"blocked = ['Softmax']\nblocked += ['Add']\n{CONVERT}blocked.append('Mul')\n",
        f"blocked = {{'Softmax'}}\nblocked |= {{'Add'}}\n{CONVERT}",
        f"blocked = ['Mul']\nblocked = ['Softmax', 'Add']\n{CONVERT}",
        f"blocked = [n for n in ('Softmax', 'Mul', 'Add') if n != 'Mul']\n{CONVERT}",
        f"def convert(m, blocked=('Softmax', 'Add')):\n    {CONVERT}",
        f"def convert(m, blocked):\n    {CONVERT}convert(m, ['Softmax', 'Add'])\n",
        f"for blocked in (['Softmax'], ['Add']):\n    {CONVERT}",
        f"blocked = ['Softmax', 'Add']\nfor m in glob('*.onnx'):\n    {CONVERT}",
        f"blocked = ['Softmax', 'Add']\nwhile more():\n    {CONVERT}",
        f"blocked = ['Softmax', 'Add']\nif args.half:\n    {CONVERT}",
        f"blocked = ['Softmax', 'Add']\nonnx.save(proto={CONVERT[4:-1]}, f='x')\n",
        f"blocked = ['Softmax', 'Add']\nall = [{CONVERT[4:-1]} for m in glob('x')]\n",
        f"blocked = ['Softmax', 'Add']\nm = {CONVERT[4:-1]} if args.half else m\n",
        f"blocked = ['Softmax', 'Add']\nargs.half and {CONVERT[4:]}",
        f"blocked = ['Softmax', 'Add']\ntry:\n    {CONVERT}except E:\n    {CONVERT}",
        f"async def f(blocked=('Softmax', 'Add')):\n    await g({CONVERT[4:-1]})\n",
        "from x import DEFAULT_OP_BLOCK_LIST as D\nblocked = D + ['Softmax', 'Add']\n" + CONVERT,
        "o = {'op_block_list': ['Softmax', 'Add']}\nm = convert_float_to_float16(m, **o)\n",
        "DEFAULT_OP_BLOCK_LIST.extend(['Softmax', 'Add'])\nm = convert_float_to_float16(m)\n",
    ],
)
def test_lists_are_those_that_the_call_gets(text: str, tmp_path: Path) -> None:
    found = read(tmp_path, "a.py", text)
    assert found.plan.pinned == of("Softmax", "Add")
    assert found.rows_of(Status.REFUSED) == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"blocked = ['Add']\nblocked.remove('Add')\n{CONVERT}", "op_block_list=blocked"),
        (f"blocked = ['Add']\nblocked += load()\n{CONVERT}", "op_block_list=blocked"),
        (
            f"blocked = ['Add']\nfor n in m.graph.node:\n    blocked.append(n.op_type)\n{CONVERT}",
            "op_block_list=blocked",
        ),
        (
            f"blocked = ['Add']\nfor n in open('f'):\n    {CONVERT}    blocked.append(n)\n",
            "op_block_list=blocked",
        ),
        (
            f"blocked = ['Add']\nall = [{CONVERT[4:-1]} for blocked in x]\n",
            "op_block_list=blocked",
        ),
        (CONVERT.replace("blocked", "5"), "op_block_list=5"),
        (CONVERT.replace("blocked", "'Add'"), "op_block_list='Add'"),
        (CONVERT.replace("blocked", "[['Add'], 3]"), "op_block_list=[['Add'], 3]"),
        (
            CONVERT.replace("blocked", "DEFAULT_OP_BLOCK_LIST + 5"),
            "op_block_list=DEFAULT_OP_BLOCK_LIST + 5",
        ),
        (
            CONVERT.replace("blocked", "a" + ".b" * 2500),
            "op_block_list=what is nested too deeply",
        ),
        ("m = convert_float_to_float16(m, **load())\n", "convert_float_to_float16(m, **load())"),
        (f"if False:\n    {CONVERT}", CONVERT[4:-1]),
        (
            "DEFAULT_OP_BLOCK_LIST.remove('Min')\nm = convert_float_to_float16(m)\n",
            "op_block_list=...",
        ),
    ],
)
def test_what_is_no_list_of_literals_is_refused(text: str, shown: str, tmp_path: Path) -> None:
    other = f"convert_to_f16(m, op_block_list=[], node_block_list=[{NAMES[0]!r}])\n"
    found = read(tmp_path, "a.py", text + other)
    assert found.plan.pinned == {NAMES[0]}
    assert [row.entry.text for row in found.rows_of(Status.REFUSED)] == [shown]


def test_a_deep_name_of_a_call_is_read(tmp_path: Path) -> None:
    text = "a" + ".b" * 2500 + ".convert_float_to_float16(m, op_block_list=['Softmax'])\n"
    assert read(tmp_path, "a.py", text).plan.pinned == of("Softmax")


@pytest.mark.parametrize(
    ("file", "text", "base"),
    [
        ("a.json", '{"op_types_to_exclude": ["Softmax"], "low_precision_type": "bf16"}', "bf16"),
        ("a.json", '{"op_types_to_exclude": ["Softmax"], "low_precision_type": "fp16"}', "fp16"),
        ("a.py", "convert(low_precision_type='bf16', op_types_to_exclude=['Softmax'])\n", "bf16"),
        ("a.py", "T = 'bf16'\nf(low_precision_type=T, op_types_to_exclude=['Softmax'])\n", "bf16"),
        ("a.sh", "autocast --op_types_to_exclude Softmax --low_precision_type bf16\n", "bf16"),
        ("a.sh", "autocast --low_precision_type=bf16 --op_types_to_exclude Softmax\n", "bf16"),
        ("a.sh", "# not -t bf16 \\\nautocast --op_types_to_exclude Softmax # -t bf16\n", "fp16"),
    ],
)
def test_the_type_that_autocast_reduces_to(file: str, text: str, base: str, tmp_path: Path) -> None:
    plan = read(tmp_path, file, text).plan
    assert plan.pinned == of("Softmax") and plan.base == base


def test_a_type_that_is_not_known_is_said(tmp_path: Path) -> None:
    text = "f(low_precision_type=args.t, op_types_to_exclude=['Softmax'])\n"
    notes = read(tmp_path, "a.py", text).notes
    assert "line 1: low_precision_type is not known; --precision says it" in notes


def test_inputs_and_unreadable_lists_are_refused(tmp_path: Path) -> None:
    call = "op_block_list=load(), node_block_list=['%s'], force_fp16_inputs={'Resize': [0]}"
    text = f"\nm = convert_float_to_float16(m, {call % NAMES[0]})\n"
    rows = read(tmp_path, "a.py", text).rows_of(Status.REFUSED)
    assert [(row.entry.text, row.entry.line) for row in rows] == [
        ("op_block_list=load()", 2),
        ("Resize", 2),
    ]
    assert rows[0].said == "is no list of literals"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("a.json", '{"op_block_list": "Softmax"}', "op_block_list must be a list of names"),
        ("a.json", '{"nodes_to_exclude": [1]}', "nodes_to_exclude must be a list of names"),
        (
            "a.json",
            '{"nodes_to_exclude": [], "low_precision_type": "fp32"}',
            "low_precision_type must be fp16 or bf16",
        ),
        ("a.json", '{"iteration": 3}', "says only the number of an iteration"),
        ("a.json", '{"base": "fp16", "pinned": []}', "is a plan already"),
        ("a.json", '{"a": 1, "b": 2}', "JSON with a, b, which is no list of layers"),
        ("a.json", "[1]", "which is no list of layers"),
        ("a.txt", "hello", "no list of layers was found in it"),
        ("a.txt", "", "no list of layers was found in it"),
        ("a.sh", "autocast --op_types_to_exclude X --layerPrecisions=a:fp32", "autocast or trt"),
        ("a.py", "f(op_block_list=[])\nlayer.precision = trt.float32\n", "block-list or script"),
        ("a.json", '{"op_block_list": ["Foo"]}', "none of its 1 entry is a layer of m.onnx"),
        ("a.json", '{"op_block_list": []}', "none of its 0 entries is a layer of m.onnx"),
        ("a.onnx", "hello", "a.onnx"),
    ],
)
def test_what_is_no_list_is_one_line(file: str, text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=reason) as error:
        read(tmp_path, file, text)
    assert "\n" not in str(error.value)


NETWORK = Network(tuple(NetworkLayer(n, "X", f"[ONNX Layer: {n}]") for n in NAMES), "9")


@pytest.mark.parametrize(
    ("passed", "first"),
    [
        ([True, True], 17),
        ([True, False, True], 26),
        ([False, False, True], 2),
        ([True], 35),
    ],
)
def test_a_replay_is_the_fewest_that_passed(passed: list[bool], first: int, tmp_path: Path) -> None:
    text = json.dumps({f"_N{i}": [one, []] for i, one in enumerate(passed)})
    found = read(tmp_path, "r.json", text, NETWORK)
    assert found.form is Form.REPLAY
    assert found.rows[0].entry.text == f"the first {first} of 35 layers"
    assert found.plan.pinned == set(NAMES[:first])
    backwards = import_list(
        str(tmp_path / "r.json"),
        GRAPH,
        "m.onnx",
        parser=lambda: (NETWORK, ""),
        form=Form.REPLAY_REVERSE,
    )
    assert backwards.plan.pinned == set(NAMES[-first:])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"_N0": [false, []]}', "no iteration passed"),
        ('{"_N0": [false, []], "_N1": [false, []]}', "no iteration passed"),
        ('{"_N1": [true, []]}', "no replay"),
        ('{"_N0": 1}', "no replay"),
        ('{"_N0": ["yes"]}', "no replay"),
    ],
)
def test_other_replays_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=reason):
        read(tmp_path, "r.json", text, NETWORK)


def test_a_replay_needs_the_parser(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="needs TensorRT's parser"):
        read(tmp_path, "r.json", '{"_N0": [true, []]}')
