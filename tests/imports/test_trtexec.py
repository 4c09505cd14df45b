"""trtexec's options are read by trtexec's own rules."""

from __future__ import annotations

import pytest

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import By, Entry, What
from bisect_trt.imports.mapping import ImportedList, Status, map_listing
from bisect_trt.imports.trtexec import has_trtexec, read_trtexec
from bisect_trt.model.graph import Graph
from bisect_trt.model.trt_names import TrtNames
from tests.model.test_trt_names import chain

GRAPH = Graph(chain("/a/Relu", "/b/Relu", "/c:0/Relu", "d"))


def entries(text: str) -> dict[str, Entry]:
    return {entry.text: entry for entry in read_trtexec(text, "list").entries}


def mapped(text: str) -> ImportedList:
    return map_listing(read_trtexec(text, "list"), TrtNames(GRAPH), GRAPH, "list")


@pytest.mark.parametrize(
    "text",
    [
        "--layerPrecisions=/a/Relu:fp32,d:fp16",
        "trtexec --onnx=m.onnx '--layerPrecisions=/a/Relu:fp32,d:fp16' --fp16",
        '"--layerPrecisions=/a/Relu:fp32,d:fp16"',
        "--layerPrecisions='/a/Relu:fp32','d:fp16'",
        "--layerPrecisions='/a/Relu':fp32,\"d\":fp16",
        "--layerPrecisions=/a/Relu:fp32,\\\nd:fp16",
        "--layerPrecisions=/a/Relu:fp32 --layerPrecisions=d:fp16",
        "import os\nos.system('trtexec --layerPrecisions=' + '/a/Relu:fp32,' 'd:fp16')",
        "args = ['--fp16', '--layerPrecisions=/a/Relu:fp32,d:fp16']",
    ],
)
def test_quotes_lines_and_python_do_not_matter(text: str) -> None:
    found = entries(text)
    assert {name: entry.precision for name, entry in found.items()} == {
        "/a/Relu": Precision.FP32,
        "d": Precision.FP16,
    }


def test_the_last_colon_splits() -> None:
    assert entries("--layerPrecisions=/c:0/Relu:fp32")["/c:0/Relu"].precision is Precision.FP32
    assert mapped("--layerPrecisions=/c:0/Relu:fp32").plan.pinned == {"/c:0/Relu"}


def test_a_comma_in_a_name_is_refused_as_trtexec_splits_it() -> None:
    found = entries("--layerPrecisions=/a/Re,lu:fp32,d:fp32")
    assert "trtexec splits at commas" in found["/a/Re"].refused
    assert found["lu"].precision is Precision.FP32


def test_lines_are_said() -> None:
    text = "#!/bin/sh\ntrtexec \\\n  --fp16 \\\n  --layerPrecisions=d:fp32 \\\n  --x\n"
    assert entries(text)["d"].line == 4
    assert entries("x = 1\ny = '--layerPrecisions=d:fp32'\n")["d"].line == 2


def test_a_whole_name_counts_before_a_pattern() -> None:
    found = mapped("--layerPrecisions=d:fp16,*:fp32")
    assert found.plan.pinned == {"/a/Relu", "/b/Relu", "/c:0/Relu"}
    assert entries("--layerPrecisions=*:fp32")["*"].by is By.WILDCARD


def test_of_two_patterns_fp32_counts() -> None:
    assert mapped("--layerPrecisions=/*:fp32,*Relu:fp16").plan.pinned == {
        "/a/Relu",
        "/b/Relu",
        "/c:0/Relu",
    }


def test_only_the_first_star_is_one() -> None:
    (row,) = mapped("--layerPrecisions=*a*:fp32").rows
    assert row.status is Status.REFUSED
    assert row.said == "matches no layer; of its * only the first counts"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("int8", "int8 is no precision of a plan"),
        ("fp33", "'fp33' is no type of TensorRT"),
        ("bf16", "bf16 beside fp16; a plan has one reduced precision"),
    ],
)
def test_types_that_no_plan_has_are_refused(kind: str, reason: str) -> None:
    (row,) = mapped(f"--fp16 --layerPrecisions=d:{kind}").rows
    assert (row.status, row.said) == (Status.REFUSED, reason)


def test_the_base_is_what_the_flags_allow() -> None:
    assert read_trtexec("--bf16 --layerPrecisions=d:fp32", "").base is Precision.BF16
    assert read_trtexec("--bf16 --fp16 --layerPrecisions=d:fp32", "").base is Precision.FP16
    assert mapped("--bf16 --layerPrecisions=d:fp32,/a/Relu:bf16").plan.base is Precision.BF16


def test_the_precision_of_a_layer_decides_over_its_outputs() -> None:
    both = "--layerPrecisions=d:fp16 --layerOutputTypes=d:fp32,/a/Relu:fp32"
    found = mapped(both)
    assert found.plan.pinned == {"/a/Relu"}
    (row,) = found.rows_of(Status.WIDENED)
    assert row.entry.what is What.OUTPUT and "keeps the whole layer" in row.said


@pytest.mark.parametrize(
    "text",
    [
        "# first try: trtexec --layerPrecisions='*:fp32' --bf16\n--layerPrecisions=d:fp32\n",
        "# it isn't\ntrtexec --layerPrecisions=d:fp32 # --layerPrecisions=/a/Relu:fp32\n",
        "trtexec \\\n  # --layerPrecisions=/a/Relu:fp32 \\\n  --layerPrecisions=d:fp32\n",
        'os.system("""\n# --layerPrecisions=*:fp32\ntrtexec --layerPrecisions=d:fp32\n""")\n',
    ],
)
def test_comments_of_a_shell_script_are_none_of_its_options(text: str) -> None:
    found = mapped(text)
    assert (found.plan.base, found.plan.pinned) == (Precision.FP16, {"d"})


def test_a_hash_in_a_word_or_in_quotes_begins_no_comment() -> None:
    named = entries("echo '# no comment' a#b\ntrtexec --layerPrecisions='# x:fp32',y#z:fp32\n")
    assert set(named) == {"# x", "y#z"}
    assert set(entries("--layerPrecisions=a #b:fp32")) == {"a #b"}  # a word without its quotes


def test_a_text_with_commented_options_alone_has_none() -> None:
    assert not has_trtexec("# trtexec --layerPrecisions=*:fp32\n")


def test_an_output_in_fp32_of_a_reduced_layer_is_refused() -> None:
    found = mapped("--layerPrecisions=/a/Relu:fp16 --layerOutputTypes=/a/Relu:fp32,d:fp32")
    (row,) = found.rows_of(Status.REFUSED)
    assert (row.entry.text, row.entry.what) == ("/a/Relu", What.OUTPUT)
    assert row.said == "computed in FP16; a plan has one type a layer"
    assert found.plan.pinned == {"d"}
    found = mapped("--layerPrecisions=/a/Relu:fp16 --layerOutputTypes=*:fp32")
    (row,) = found.rows_of(Status.WIDENED)
    assert row.said == "1 layer of it computed in FP16; a plan has one type a layer"
    assert found.plan.pinned == {"/b/Relu", "/c:0/Relu", "d"}
    again = mapped("--layerPrecisions=d:fp16 --layerOutputTypes=d:fp16,*:fp32,/a/Relu:fp16")
    assert again.plan.pinned == {"/b/Relu", "/c:0/Relu"} and not again.rows_of(Status.REFUSED)


def test_many_joined_strings_are_one() -> None:
    parts = " + ".join(f"'x{i}:fp16,'" for i in range(1_500))
    found = entries(f"text = '--layerPrecisions=' + {parts} + 'd:fp32'\n")
    assert len(found) == 1_501 and found["d"].precision is Precision.FP32


def test_outputs_of_several_types_keep_the_layer() -> None:
    found = mapped("--layerOutputTypes=d:fp16+fp32,/a/Relu:fp32+fp32")
    assert found.plan.pinned == {"/a/Relu", "d"}
    assert "several types" in found.rows[0].said


def test_repeated_names_are_said_and_the_last_counts() -> None:
    found = mapped("--layerPrecisions=d:fp32,d:fp16,/a/Relu:fp32,/a/Relu:fp32")
    assert found.plan.pinned == {"/a/Relu"}
    notes = " | ".join(found.notes)
    assert "2 repeated entries, such as 'd'; the last of each counts" in notes
    assert "1 of them have another type before, such as 'd'" in notes


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("", "without --precisionConstraints=obey TensorRT may have ignored the list"),
        ("--precisionConstraints=prefer", "without --precisionConstraints=obey"),
        ("--int8", "--int8 is not carried over"),
        ("", "without --noTF32"),
    ],
)
def test_what_the_other_options_mean_is_said(text: str, note: str) -> None:
    found = read_trtexec(f"{text} --layerPrecisions=d:fp32", "list")
    assert any(note in one for one in found.notes)


def test_what_export_writes_needs_no_note() -> None:
    text = "--fp16 --noTF32 --precisionConstraints=obey '--layerPrecisions=d:fp32'"
    assert mapped(text).notes == (
        "layers are found by the parser's rule for names; with tensorrt-rtx-cu13 installed its "
        "parser is asked",
    )


def test_a_text_without_such_an_option_is_refused() -> None:
    with pytest.raises(BadInputError, match="no --layerPrecisions or --layerOutputTypes in it"):
        read_trtexec("--fp16 --precisionConstraints=obey", "list")


def test_integer_layers_are_fp32_anyway() -> None:
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Relu", ["x"], ["y"], name="relu"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y"))
    s = helper.make_tensor_value_info("s", TensorProto.INT64, [1])
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y, s]), opset_imports=[helper.make_opsetid("", 17)]
    )
    graph = Graph(model)
    listing = read_trtexec("--layerPrecisions=shape:fp32,relu:fp32", "list")
    found = map_listing(listing, TrtNames(graph), graph, "list")
    assert found.plan.pinned == {"relu"}
    assert found.rows[0].said == "is never reduced, so it is FP32 in every plan"
