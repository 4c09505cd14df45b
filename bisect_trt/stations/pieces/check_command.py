"""A command of the user's that says of a piece whether it is fine, as polygraphy's ``debug reduce
--check``: no engine is needed then.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from bisect_trt.core.disk.scratch import scratch
from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.core.piece import Piece
from bisect_trt.core.precision import Precision
from bisect_trt.core.verdict import Verdict
from bisect_trt.graph.files.save import save_model
from bisect_trt.stations.case.array_files import write_npz
from bisect_trt.stations.pieces.seen import Budget, Seen
from bisect_trt.stations.pieces.specimens import Specimen

MODEL, INPUTS, EXPECTED = "model.onnx", "inputs.npz", "expected.npz"
_PLACES = {"{model}": MODEL, "{inputs}": INPUTS, "{expected}": EXPECTED}
_KEPT = 4096
_BAD = 1
"""The exit code that calls a piece bad."""


class CheckTrials:
    """Judges pieces by the exit code of a command: 0 means fine, 1 still bad, and anything else,
    or a signal, that the piece cannot be judged.

    Args:
        command: its words, as a shell splits them; no shell runs it. ``{model}``, ``{inputs}`` and
            ``{expected}`` become the paths of the piece's files, in a folder of its own; without
            ``{model}`` that path is appended.
        timeout_s: the seconds that one call may take.
        budget: of calls.

    Raises:
        BadInputError: it cannot be split, or is empty.
    """

    def __init__(self, command: str, timeout_s: float, budget: Budget) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise BadInputError(f"--check {command!r}: {error}") from error
        if not self._words:
            raise BadInputError("--check '': an empty command")
        if not any("{model}" in word for word in self._words):
            self._words.append("{model}")
        self._command = command
        self._timeout_s = timeout_s
        self.budget = budget
        self.precision = self.explained = Precision.FP32
        self.versions: Mapping[str, str] = {}
        self._known: dict[tuple[Piece, bool], Seen] = {}

    def try_whole(self, specimen: Specimen) -> Seen:
        """What the command says of the whole model.

        Raises:
            BadInputError: it does not judge it, cannot be started, or takes too long.
        """
        seen = self._known[specimen.key] = self._called(specimen)
        if seen.verdict is Verdict.UNSURE:
            raise BadInputError(
                f"--check {self._command!r}: {seen.failure} for the whole model, which says "
                "nothing of it (0 means fine, 1 still bad)"
            )
        return seen

    def ask(self, specimen: Specimen) -> Verdict:
        """PASS where the command calls the piece bad, UNSURE where it does not judge it.

        Raises:
            BadInputError: it cannot be started, or takes too long.
        """
        seen = self._called(specimen)
        if seen.verdict is Verdict.UNSURE:
            return Verdict.UNSURE
        if seen.failure:
            self._known[specimen.key] = seen
        return Verdict.PASS if seen.failure else Verdict.FAIL

    def figures(self, specimen: Specimen) -> Seen:
        """What the command said when it called the piece bad."""
        return self._known[specimen.key]

    known = figures

    def _called(self, specimen: Specimen) -> Seen:
        self.budget.spend()
        with scratch("check") as made:
            folder = Path(made)
            write_specimen(specimen, folder)
            with (folder / "output.txt").open("w+b") as log:
                code = self._exit_code([_placed(word, folder) for word in self._words], log)
                log.seek(max(0, log.seek(0, os.SEEK_END) - _KEPT))
                lines = log.read().decode(errors="replace").strip().splitlines()
        if code == 0:
            return Seen(1, by_command=True)
        said = f": {lines[-1]}" if lines else ""
        ended = f"exit code {code}" if code > 0 else f"signal {-code}"
        verdict = Verdict.FAIL if code == _BAD else Verdict.UNSURE
        return Seen(1, failure=one_line(f"{ended}{said}"), verdict=verdict, by_command=True)

    def _exit_code(self, words: Sequence[str], log: IO[bytes]) -> int:
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        except OSError as error:
            raise BadInputError(
                f"--check {self._command!r}: {self._words[0]!r} cannot be started "
                f"({error.strerror})"
            ) from error
        try:
            return child.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise BadInputError(
                f"--check {self._command!r}: no end after {self._timeout_s:g} s, which says "
                "nothing of the piece; mend the command, or raise --probe-timeout"
            ) from None
        finally:
            if child.poll() is None:
                with suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def write_specimen(specimen: Specimen, folder: Path) -> None:
    """The piece's model, inputs and expected outputs as files of ``folder``."""
    save_model(specimen.model, folder / MODEL)
    write_npz(folder / INPUTS, specimen.sample.arrays)
    write_npz(folder / EXPECTED, specimen.expected)


def _placed(word: str, folder: Path) -> str:
    for place, name in _PLACES.items():
        word = word.replace(place, str(folder / name))
    return word
