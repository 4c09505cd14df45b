"""Models into ONNX Runtime sessions: weights that lie in files are mapped, and shared by all
sessions of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import onnx
import onnxruntime as ort

from bisect_trt.core.errors import RunnerUnavailableError
from bisect_trt.core.precision import Precision
from bisect_trt.graph.files.runtime_forms import MOST_SENT, session_form
from bisect_trt.graph.tensors.tensor_values import array_of, place_of, size_of
from bisect_trt.runners.ort.devices import CPU, Device, load_cuda_libraries
from bisect_trt.runners.ort.values import let_go_of_source, owned

RoundedConstants = Callable[[str, Precision], ort.OrtValue]
"""Gives the constant of a name, rounded."""

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""The setting that says below which folder the places of values are."""

_MANY_INITIALISERS = 30_000
"""ONNX Runtime takes each initialiser that it has read out of the graph, and looks for it among all
that are left there: 60,000 take it 15 s of 20. A session that writes its model keeps them, for 2.6
kB each; of fewer the writing costs what it spares. (Not tried on a GPU.)"""

_held: WeakKeyDictionary[ort.InferenceSession, list[ort.OrtValue]] = WeakKeyDictionary()
"""What sessions borrow: the values must live as long as they do."""


def opened(
    model: onnx.ModelProto | Callable[[], onnx.ModelProto],
    options: ort.SessionOptions,
    constants: RoundedConstants | None = None,
    *,
    shares_weights: bool = False,
    device: Device = CPU,
    without: Sequence[str] = (),
) -> ort.InferenceSession:
    """A session over ``model``.

    Args:
        model: of any size; or what makes it, so that nobody holds it while it is opened.
        options: completed here.
        constants: gives rounded constants; without it they are computed for this session.
        shares_weights: whether weights in files are used where this process has them mapped.
            Without it ONNX Runtime maps them, makes the order of them that it likes, and lets each
            go: that is no more memory for one session, and more for several.
        device: what computes; another than the CPU gives the same bits every time.
        without: ONNX Runtime's optimisers that are left out, by their names.

    Raises:
        RunnerUnavailableError: the device does not start.
        Exception: what ONNX Runtime raises.
    """
    options.use_deterministic_compute = device != CPU
    if device != CPU:
        load_cuda_libraries()
    with session_form(model() if callable(model) else model) as form:
        if form.folder:
            options.add_session_config_entry(WEIGHTS_FOLDER, form.folder)
        written = len(form.content) + sum(map(size_of, form.rounded))
        many = form.initialisers >= _MANY_INITIALISERS and device == CPU
        if many and written <= MOST_SENT:
            options.optimized_model_filepath = os.devnull
        shared = form.mapped if shares_weights else ()
        values = [owned(array_of(tensor)) for tensor in shared]
        for tensor, value in zip(shared, values, strict=True):
            options.add_initializer(tensor.name, value)
        rounded = [_rounded(tensor, constants) for tensor in form.rounded]
        if rounded:
            # Unlike the others these are copied: an optimisation would read a shared one's file.
            options.add_external_initializers([t.name for t in form.rounded], rounded)
        # Falling back it would print, and compute elsewhere.
        session = ort.InferenceSession(
            form.content,
            options,
            providers=device.providers,
            enable_fallback=0,
            disabled_optimizers=list(without),
        )
    if device.provider not in session.get_providers():
        raise RunnerUnavailableError(
            "ONNX Runtime's CUDA provider does not start here: no usable GPU, or CUDA libraries "
            "are missing"
        )
    let_go_of_source(session)
    _held[session] = values
    return session


def _rounded(tensor: onnx.TensorProto, constants: RoundedConstants | None) -> ort.OrtValue:
    place = place_of(tensor)
    assert place is not None and place.rounding is not None
    if constants is None:
        return owned(array_of(tensor))
    return constants(place.source, place.rounding)
