"""The command line that asks for what some settings ask for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import onnx

from bisect_trt.stations.asked.settings import Settings, options


def as_command(settings: Settings, command: str = "run") -> str:
    """``bisect-trt`` with every option of ``command`` that is not at its default, quoted for a
    POSIX shell.

    What a notebook gave as an object stands there as a word in capitals.
    """
    model = "MODEL" if isinstance(settings.model, onnx.ModelProto) else str(settings.model)
    words = ["bisect-trt", command, model]
    for source in settings.inputs:
        words += ["--input", _word(source)]
    defaults = {f.name: f.default for f in fields(Settings)}
    for name, its in options().items():
        value = getattr(settings, name)
        if command not in its.commands or value == defaults[name]:
            continue
        if its.kind is bool:
            words.append(its.flag)
            continue
        for one in value if its.repeatable else (value,):
            words += [its.flag, _word(one)]
    return shlex.join(words)


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return "ARRAYS"
    if isinstance(value, Iterator):
        return "SAMPLES"
    if callable(value):
        return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', 'FUNCTION')}"
    return str(value)
