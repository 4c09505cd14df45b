"""How to build the engine that the answer is for: commands and code to copy."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.core.disk.run_files import PLAN, REWRITTEN_MODEL, TYPED_MODEL
from bisect_trt.core.precision import Precision
from bisect_trt.report.record.record import Record
from bisect_trt.stations.asked.settings import options

_ENGINE = "model.engine"
_FROM = "From where the run was started."
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """``name`` for a heading, ``text`` to copy, and what to know about it (``note``)."""

    name: str
    text: str
    note: str = ""


def recipes(result: Record) -> list[Recipe]:
    """How to ship the plan; nothing where none meets the requirements."""
    if not result.passed:
        return []
    tf32 = Precision.TF32 in (result.plan.base, result.plan.pin_precision)
    shapes = profile_of_inputs(result)
    found = [
        Recipe("trtexec", _trtexec(shapes, tf32=tf32), "TensorRT 10 and 11."),
        Recipe("Python", _python(shapes, tf32=tf32), "tensorrt, or tensorrt_rtx."),
        Recipe("polygraphy", _polygraphy(shapes, tf32=tf32)),
        Recipe(
            "Check it in a pipeline", _verify(result), f"{_FROM} Exit code 0 if the plan holds."
        ),
    ]
    plan = shlex.quote(_plan(result))
    model = result.model
    if result.rewritten:  # the plan is of its layers
        model = str(Path(_plan(result)).with_name(REWRITTEN_MODEL))
    weak = f"bisect-trt export {shlex.quote(model)} --plan {plan} --format trtexec"
    found.append(
        Recipe("TensorRT 8.6 to 10, weakly typed", weak, f"{_FROM} Prints trtexec's arguments.")
    )
    return found


def profile_of_inputs(result: Record) -> dict[str, tuple[Shape, Shape, Shape]]:
    """The smallest, usual and largest shape that the inputs had, of each graph input whose shape
    the model leaves open.
    """
    if "shapes" not in result.inputs:
        return {}
    seen = [json.loads(text) for text in result.inputs["shapes"]]
    found = {}
    for name in result.dynamic_inputs:
        shapes = [tuple(int(d) for d in one[name]) for one in seen if name in one]
        if shapes and len({len(shape) for shape in shapes}) == 1:
            each = list(zip(*shapes, strict=True))
            found[name] = (tuple(map(min, each)), shapes[0], tuple(map(max, each)))
    return found


Profile = Mapping[str, tuple[Shape, Shape, Shape]]
_PARTS = ("min", "opt", "max")


def _trtexec(profile: Profile, *, tf32: bool) -> str:
    words = ["trtexec", f"--onnx={TYPED_MODEL}", "--stronglyTyped"]
    words += [] if tf32 else ["--noTF32"]
    for place, part in enumerate(_PARTS):
        shapes = [f"{n}:{'x'.join(map(str, s[place]))}" for n, s in profile.items() if s[place]]
        words += [f"--{part}Shapes={','.join(shapes)}"] if shapes else []
    return _joined([*words, f"--saveEngine={_ENGINE}"])


def _polygraphy(profile: Profile, *, tf32: bool) -> str:
    words = ["polygraphy", "convert", TYPED_MODEL, "--strongly-typed"]
    words += ["--tf32"] if tf32 else []
    for place, part in enumerate(_PARTS):
        shapes = [f"{n}:[{','.join(map(str, s[place]))}]" for n, s in profile.items()]
        words += [f"--trt-{part}-shapes", *shapes] if shapes else []
    return _joined([*words, "-o", _ENGINE])


_OF_INPUTS = frozenset({"--input", "--stacked", "--infinite", "--rewrite", "--profile"})
"""How the inputs are read and run; what is asked of them the plan says."""


def _verify(result: Record) -> str:
    """The same inputs; the command of the run begins with "bisect-trt run MODEL"."""
    switches = {its.flag for its in options().values() if its.kind is bool}
    words, kept = iter(shlex.split(result.command)[3:]), list[str]()
    for flag in words:
        value = [] if flag in switches else [next(words, "")]
        kept += [flag, *value] if flag in _OF_INPUTS else []
    return _joined(["bisect-trt", "verify", result.model, *kept, "--plan", _plan(result)])


def _plan(result: Record) -> str:
    """Its path from where the run was started, as those of the model and its inputs are."""
    words = shlex.split(result.command)
    folder = words[words.index("--out") + 1] if "--out" in words[:-1] else ""
    return str(Path(folder) / PLAN)


def folded(command: str) -> str:
    """A long command of a POSIX shell on lines of their own."""
    return _joined(shlex.split(command))


def _joined(words: Sequence[str]) -> str:
    """For a POSIX shell, folded where lines would become long."""
    lines, parts = [""], [shlex.quote(words[0])]
    for word in words[1:]:
        # An option's value stays on its line.
        if parts[-1].startswith("-") and not word.startswith("-"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    for word in parts:
        if len(lines[-1]) + len(word) > 90 and lines[-1]:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _python(profile: Profile, *, tf32: bool) -> str:
    names = "\n".join(
        f"profile.set_shape({name!r}, {low!r}, {usual!r}, {high!r})"
        for name, (low, usual, high) in profile.items()
    )
    shapes = ""
    if names:
        made = "profile = builder.create_optimization_profile()"
        shapes = f"{made}\n{names}\nconfig.add_optimization_profile(profile)\n"
    flag = "set_flag" if tf32 else "clear_flag"
    return re.sub(
        r"\n{3,}",
        "\n\n",
        f"""import tensorrt as trt

logger = trt.Logger(trt.Logger.WARNING)
builder = trt.Builder(logger)
typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
network = builder.create_network(0 if typed is None else 1 << int(typed))
parser = trt.OnnxParser(network, logger)
if not parser.parse_from_file({TYPED_MODEL!r}):
    raise RuntimeError(parser.get_error(0).desc())
config = builder.create_builder_config()
config.{flag}(trt.BuilderFlag.TF32)
{shapes}engine = builder.build_serialized_network(network, config)
with open({_ENGINE!r}, "wb") as file:
    file.write(engine)
""",
    ).rstrip()
