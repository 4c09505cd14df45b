"""Models of which nothing can be told, or nothing that would be true of an engine."""

from __future__ import annotations

from onnx import TensorProto, helper

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.finding import Finding
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.tensors.tensor_types import UNKNOWN, every_node


def refuse_unfit(graph: Graph, name: str) -> None:
    """Nothing, where the model can be compared.

    Args:
        graph: the model.
        name: its file's, for the message.

    Raises:
        BadInputError: names an output that is no tensor, or of a type that is not compared; a
            constant that is stored sparsely; a normalisation that learns.
    """
    _refuse_incomparable(graph, name)
    _refuse_sparse(graph, name)
    _refuse_training(graph, name)


def refusals(graph: Graph, name: str) -> list[Finding]:
    """What :func:`refuse_unfit` would say, for whoever only looks.

    Args:
        graph: the model.
        name: its file's.
    """
    found = []
    for check in (_refuse_incomparable, _refuse_sparse, _refuse_training):
        try:
            check(graph, name)
        except BadInputError as error:
            found.append(Finding("refused", "", f"a run refuses this model: {error}", True))
    return found


def _refuse_sparse(graph: Graph, name: str) -> None:
    for sparse in graph.proto.graph.sparse_initializer:
        raise BadInputError(
            f"{name}: sparse initialiser {sparse.values.name!r} cannot be emulated; store it as a "
            "dense tensor"
        )


def _refuse_training(graph: Graph, name: str) -> None:
    """Nothing, where no normalisation learns from what it is given: its numbers would depend on
    what was run before, and engines do not take it.

    Args:
        graph: the model.
        name: its file's, for the message.

    Raises:
        BadInputError: names the node.
    """
    for node, layer in zip(graph.proto.graph.node, graph.names, strict=True):
        for inner in every_node([node]):
            learns = inner.op_type == "BatchNormalization" and any(
                a.name == "training_mode" and a.i for a in inner.attribute
            )
            if learns:
                raise BadInputError(
                    f"{name}: layer {layer!r} holds a BatchNormalization in training mode, whose "
                    "statistics change at every run; export the model for inference (model.eval())"
                )


def _refuse_incomparable(graph: Graph, name: str) -> None:
    """Nothing, where numbers can be told of every output.

    Args:
        graph: the model.
        name: its file's, for the message.

    Raises:
        BadInputError: names an output that is no tensor, or of a type that is not compared.
    """
    for output in graph.proto.graph.output:
        if not output.type.HasField("tensor_type"):
            raise BadInputError(
                f"{name}: output {output.name!r} is no tensor; sequences cannot be compared"
            )
        held = graph.types.type_of(output.name)
        if held == TensorProto.STRING:
            raise BadInputError(
                f"{name}: output {output.name!r} is text, which engines do not have and no metric "
                "compares: cut the model before it"
            )
        if not _has_numbers(held):
            called = helper.tensor_dtype_to_string(held).rpartition(".")[2].lower()
            raise BadInputError(
                f"{name}: output {output.name!r} is {called}, of which ONNX Runtime gives no "
                "numbers: make an FP32 output of it (a Cast behind it, or what is before its Cast)"
            )


def _has_numbers(held: int) -> bool:
    """Whether ONNX Runtime gives NumPy's numbers of such a tensor: bfloat16 it gives not at all,
    and of eight bits and fewer their codes.
    """
    if held == UNKNOWN:
        return True
    dtype = helper.tensor_dtype_to_np_dtype(held)
    return dtype.isbuiltin == 1 and dtype.kind in "fiub"
