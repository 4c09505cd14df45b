"""One segment of a switched model, fed with its constants as a plan has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import intern

import onnxruntime as ort

from bisect_trt.core.errors import BisectError
from bisect_trt.graph.passes.segments.nameless import Names
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.segment_form import Ready, SegmentForm
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.sessions import failure_of_session
from bisect_trt.runners.ort.values import Value, value_of


class SegmentSession:
    """Runs a segment by the sessions of ``form``. There may be one for every layer of a network of
    thousands: it holds no more than it must. ``takes`` and ``gives`` are tensors of the model.

    Args:
        segment: a part of a switched model, which is not kept.
        constants: of the model, in the memory of the form's device; their lock is held while
            sessions are made, but by :meth:`open`.
        form: of this segment, or of all that are the same but for names and weights.
        names: what the segment's own tensors and nodes are called in the form; None where they are
            called the same.
        options: for the first inference.
    """

    __slots__ = (
        "__weakref__",
        "_constants",
        "_fed",
        "_names",
        "_options",
        "_weights",
        "form",
        "gives",
        "takes",
    )

    def __init__(
        self,
        segment: Segment,
        constants: ConstantStore | DeviceConstants,
        form: SegmentForm,
        *,
        names: Names | None = None,
        options: ort.RunOptions | None = None,
    ) -> None:
        self.form = form
        self._names, self._constants, self._options = names, constants, options
        # Of each the form has one in the same place.
        self.takes = tuple(map(intern, segment.takes))
        self.gives = tuple(map(intern, segment.gives))
        self._weights = tuple(segment.weights.values())
        self._fed: tuple[Ready, bytes, dict[str, Value]] | None = None

    @property
    def sessions(self) -> tuple[SegmentSession, ...]:
        """Itself: a segment may be run by several."""
        return (self,)

    @property
    def switches(self) -> tuple[str, ...]:
        """The model's flags and weights that a setting says something of, in its order; of a
        segment whose form has other names.
        """
        return self._names.outside[len(self.takes) + len(self.gives) :] if self._names else ()

    @property
    def on_cpu(self) -> tuple[str, ...]:
        """What the CPU ran in place of another device, known after the first inference."""
        return self.form.on_cpu

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has nothing to do."""
        return self.form.is_open

    def open(self) -> None:
        """As :meth:`SegmentForm.open`, where that is needed. No lock is taken: whoever holds it may
        wait for the threads that open.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        if not self.is_open:
            try:
                self.form.open()
            except BisectError as error:
                self._name(error)
                raise

    def close(self) -> None:
        """Let all sessions of the form go; whoever runs next opens one, who is running ends by what
        it has.
        """
        with self._constants.lent.lock:
            self.form.close()

    def forget(self) -> None:
        """Let what it was fed with last go."""
        with self._constants.lent.lock:
            self._fed = None
            self._constants.lent.by.pop(self, None)

    def states(self, setting: Setting) -> dict[str, bool]:
        """What ``setting`` says of each flag, and of each weight: whether it is rounded as for a
        lowered layer. By the names of its form.
        """
        asked = self.form.segment
        return dict(zip([*asked.flags, *asked.weights], setting.tolist(), strict=True))

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value]:
        """What the segment gives; several threads may ask.

        Args:
            tensors: at least what it takes.
            setting: of its switches.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        form, lent = self.form, self._constants.lent
        with lent.lock:
            try:
                ready = form.session_for(setting)
            except BisectError as error:
                self._name(error)
                raise
            feed = dict(self._switches(ready, setting))
            owners = lent.by[self] if self._weights else None
            options, self._options = self._options, None
        takes = ready.segment.takes
        pairs: Iterable[tuple[str, str]] = zip(form.segment.takes, self.takes, strict=True)
        if len(takes) < len(self.takes):  # one without switches may need less
            left = set(takes)
            pairs = ((inside, name) for inside, name in pairs if inside in left)
        for inside, name in pairs:
            feed[inside] = tensors[name]
        try:
            results = ready.call(feed, form.segment.gives, options)
        except Exception as error:
            if ready.places and not form.ran:  # of lists no shape is told: a Scan asks for it
                with lent.lock:
                    form.refuse_lists(ready)
                return self.run(tensors, setting)
            self._name(error)
            raise failure_of_session("the emulated model", error) from error
        del owners  # until here another thread may have had their place
        if ready.is_new:
            with lent.lock:
                form.hear(ready)
        return {name: results[i] for i, name in enumerate(self.gives)}

    def _name(self, error: Exception) -> None:
        """Let the message of ``error`` say the segment's own names."""
        if self._names is not None:
            error.args = (self._names.own(str(error)),)

    def _switches(self, ready: Ready, setting: Setting) -> Mapping[str, Value]:
        """Flags and weights as the setting has them; those of the last run where it is the same."""
        key, lent = setting.tobytes(), self._constants.lent
        fed = self._fed
        if (
            fed is not None
            and fed[0] is ready
            and fed[1] == key
            and (not self._weights or self in lent.by)
        ):
            return fed[2]
        left, places = ready.segment.flags, ready.places
        asked = self.form.segment
        feed = {
            name: self.form.state(bool(state), name in places)
            for name, state in zip(asked.flags, setting, strict=False)
            if name in left
        }
        lowered = setting[len(asked.flags) :]
        owners = []
        for name, weight, low in zip(asked.weights, self._weights, lowered, strict=True):
            precision = weight.lowered if low else weight.pinned
            # Two layers may read one constant in two precisions, of which the store keeps one.
            owners.append(self._constants.owner(weight.tensor, precision))
            feed[name] = value_of(owners[-1])
        if owners:
            lent.by[self] = owners
        self._fed = (ready, key, feed)
        return feed
