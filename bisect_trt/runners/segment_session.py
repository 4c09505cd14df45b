"""Sessions of one segment, and the switches that choose what it rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.errors import BisectError, RunnerFailedError
from bisect_trt.model.segment_forms import Names, with_lists, without_branches
from bisect_trt.model.segments import PackedSegment
from bisect_trt.model.switched import Segment, settled
from bisect_trt.runners.constants import ConstantStore, DeviceConstants
from bisect_trt.runners.device import CPU, Device
from bisect_trt.runners.ort_session import cpu_nodes, failure_of_session, switched_session
from bisect_trt.runners.values import Value, caller, owned, value_of

Setting = NDArray[np.bool_]
"""For one segment: its flags, then which of its weights are rounded as for a reduced layer."""


class Switches:
    """Turns the set of reduced layers into settings; what depends on names alone is done once."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._place: dict[str, int] = {}
        # Each switch with each layer that asks for it, and the one that it is not needed for.
        switches: list[int] = []
        layers: list[int] = []
        unless: list[int] = []
        ends = []
        for segment in segments:
            asked = [(flag.on, flag.off) for flag in segment.flags.values()]
            asked += [((weight.layer,), ()) for weight in segment.weights.values()]
            for on, off in asked:
                layers += [self._index(name) for name in on]
                switches += [len(unless)] * len(on)
                assert len(off) <= 1
                unless.append(self._index(off[0]) if off else -1)
            ends.append(len(unless))
        self._switches, self._layers, self._unless = (
            np.asarray(column, np.intp) for column in (switches, layers, unless)
        )
        self._bounds = list(zip([0, *ends], ends, strict=False))
        self._starts = self._first_segments(ends)

    def of(self, reduced: Iterable[str]) -> list[Setting]:
        """The setting of each segment where the layers ``reduced`` are.

        A flag is on where one of its layers is reduced and not the one that has rounded the tensor
        already.
        """
        # The last place stands for no layer: index -1.
        low = np.zeros(len(self._place) + 1, np.bool_)
        low[[place for name in reduced if (place := self._place.get(name)) is not None]] = True
        values = np.zeros(len(self._unless), np.bool_)
        values[self._switches[low[self._layers]]] = True
        values &= ~low[self._unless]
        return [values[start:end] for start, end in self._bounds]

    def start_of(self, layer: str) -> int:
        """The first segment that ``layer`` may change where it alone is reduced."""
        return self._starts.get(layer, 0)

    def _index(self, layer: str) -> int:
        return self._place.setdefault(layer, len(self._place))

    def _first_segments(self, ends: Sequence[int]) -> dict[str, int]:
        first = np.full(len(self._place), len(ends), np.intp)
        np.minimum.at(first, self._layers, np.searchsorted(ends, self._switches, side="right"))
        return {name: int(first[i]) for name, i in self._place.items() if first[i] < len(ends)}


_WORTH_SETTLING = 48
"""A session without switches costs as much to make as it saves in about 24 runs of a segment of
small nodes. It is made after more with the same switches than a search set has samples: a plan that
is tried on those comes once."""

_SETTLED = 2
"""A run mostly asks for two settings again and again: nothing reduced, and the plan in work."""

_COUNTED = 64
"""Settings whose runs are counted: of a form that many segments have each may come in another."""


@dataclass(eq=False)
class Ready:
    """A session of ``segment``, whose model was let go; its flags of ``places`` are integers;
    ``profiles`` is where ONNX Runtime writes what ran where, until that was read; ``is_new`` until
    it was heard that it ran."""

    session: ort.InferenceSession
    call: Callable[..., Any]
    segment: Segment
    places: frozenset[str]
    profiles: tempfile.TemporaryDirectory[str] | None
    is_new: bool = True


class SegmentForm:
    """Makes the sessions of ``packed`` when they are first needed.

    ``selects`` says that a session with switches made from then on computes both roundings and
    takes one, as one on another device than the CPU does; the numbers are the same. ``ran`` that
    one of those did. ``on_cpu`` names what the CPU ran in place of another device.
    """

    def __init__(
        self, packed: PackedSegment, threads: int, device: Device, *, settles: bool = True
    ) -> None:
        self._packed = packed
        self.segment = packed.named
        self.selects = self.ran = False
        self.on_cpu: tuple[str, ...] = ()
        self._threads, self._device = threads, device
        self._settles = settles and device == CPU
        self._switched: Ready | None = None
        # The values must outlive the call, and making one costs more than passing it.
        self._states = [
            owned(np.array(state, dtype), device.memory, device.number)
            for dtype in (np.bool_, np.int64)
            for state in (False, True)
        ]
        self._settled: dict[bytes, Ready] = {}
        # When each was asked for last; how often another was, and since when.
        self._last: dict[bytes, int] = {}
        self._uses: dict[bytes, tuple[int, int]] = {}
        self._calls = 0

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has nothing to do."""
        return self._switched is not None

    def open(self) -> None:
        """Make the session that most runs need, where there is none; several forms' are made side
        by side, so no lock is taken. Two who open at a time make one session in vain.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        if self._switched is None:
            self._switched = self._with_switches()

    def close(self) -> None:
        """Let all sessions go; who is running ends by what it has."""
        self._switched = None
        self._settled.clear()
        self._last.clear()

    def unpacked(self) -> Segment:
        """The segment with its model, a new object."""
        return self._packed.unpacked()

    def as_set(self, setting: Setting) -> Segment:
        """The segment with its switches written out as ``setting`` has them."""
        on = {name for name, state in zip(self.segment.flags, setting, strict=False) if state}
        return settled(self.unpacked(), on)

    def session_for(self, setting: Setting) -> Ready:
        """The session without switches where this setting came often enough, and no more others do
        than have a place, else with them.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        key = setting.tobytes()
        self._calls += 1
        if key in self._settled:
            self._last[key] = self._calls
            return self._settled[key]
        uses, since = self._uses.pop(key, (0, self._calls))
        self._uses[key] = uses + 1, since
        if uses == _WORTH_SETTLING and self._settles:
            del self._uses[key]
            if self._has_place(since):
                self._last[key] = self._calls
                self._settled[key] = self._opened(self.as_set(setting))
                return self._settled[key]
        if len(self._uses) > _COUNTED:
            del self._uses[next(iter(self._uses))]
        if self._switched is None:
            self._switched = self._with_switches()
        return self._switched

    def _has_place(self, since: int) -> bool:
        """Whether another setting may be settled; one gives way that was not asked for ``since``
        that call.
        """
        if len(self._settled) == _SETTLED:
            idle = [key for key in self._settled if self._last[key] < since]
            for key in idle[:1]:
                del self._settled[key], self._last[key]
        return len(self._settled) < _SETTLED

    def state(self, on: bool, is_place: bool) -> Value:
        """What a flag that is ``on`` or not is fed with, as a boolean or as a place in a list."""
        return value_of(self._states[2 * is_place + on])

    def hear(self, ready: Ready) -> None:
        """Hear that ``ready`` ran."""
        self.ran = self.ran or bool(ready.places)
        profiles, ready.profiles = ready.profiles, None
        ready.is_new = False
        if profiles is not None:
            self.on_cpu = tuple(cpu_nodes(ready.session))
            profiles.cleanup()

    def refuse_lists(self, ready: Ready) -> None:
        """Hear that ``ready``, which never ran, selects and cannot: its flags will branch."""
        self.selects = False
        if self._switched is ready:  # another thread may have met it before
            self._switched = None

    def _with_switches(self) -> Ready:
        whole = self.unpacked()
        if self._device != CPU:
            return self._opened(without_branches(whole))
        if self.selects:
            try:
                return self._opened(*with_lists(whole))
            except RunnerFailedError:  # some operators need shapes beforehand; a list tells none
                self.selects = self.ran = False
        return self._opened(whole)

    def _opened(self, segment: Segment, places: frozenset[str] = frozenset()) -> Ready:
        profiles, profile = None, None
        if self._device != CPU:
            profiles = tempfile.TemporaryDirectory(prefix="bisect-trt-")
            profile = str(Path(profiles.name) / "profile")
        session = switched_session(segment.model, self._threads, self._device, profile)
        named = replace(segment, model=onnx.ModelProto())
        return Ready(session, caller(session), named, places, profiles)


class SegmentSession:
    """Runs a segment by the sessions of ``form``. There may be one for every layer of a network of
    thousands: it holds no more than it must. ``takes`` and ``gives`` are tensors of the model.
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
        reduced layer. By the names of its form.
        """
        asked = self.form.segment
        return dict(zip([*asked.flags, *asked.weights], setting.tolist(), strict=True))

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value]:
        """What the segment gives; several threads may ask.

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
        reduced = setting[len(asked.flags) :]
        owners = []
        for name, weight, low in zip(asked.weights, self._weights, reduced, strict=True):
            precision = weight.reduced if low else weight.pinned
            # Two layers may read one constant in two precisions, of which the store keeps one.
            owners.append(self._constants.owner(weight.tensor, precision))
            feed[name] = value_of(owners[-1])
        if owners:
            lent.by[self] = owners
        self._fed = (ready, key, feed)
        return feed
