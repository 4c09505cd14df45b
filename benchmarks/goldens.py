"""What the tool answers for every fixture, case, public report, block, random network and exported
model: one committed file, so that no answer changes unseen.

- ``python -m benchmarks.goldens`` (or ``check``) makes every answer again, prints what differs from
  ``benchmarks/results/goldens.json``, and ends with 1 where something does.
- ``write`` makes them and writes the file. An answer that is the same keeps its lines.
- ``diff REV [REV2]`` prints what changed between two revisions of the file, or between one and the
  file as it is. Paths are files.

``check`` and ``write`` take names, or patterns such as ``'block *'``. ``--slow`` adds the runs that
take minutes. Peak memory and seconds are written down and not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.common import ROOT
from benchmarks.golden_jobs import DEFAULTS, Job, every_job
from bisect_trt.base.atomic_files import write_whole
from bisect_trt.base.display import counted, some_of
from bisect_trt.version import __version__

FILE = "benchmarks/results/goldens.json"
GOLDENS = ROOT / FILE
_MEASURED = ("seconds", "peak_mb")
_LAYOUT = ("encoder_decomposed", f"encoder_decomposed{DEFAULTS}")
"""The runs whose keys, files and columns are kept: those of the others are the same."""

SCORE_DIGITS = 6
"""Scores that agree to so many digits are the same: the order of a sum may differ, no rounding
may.
"""

_NOISE = 1e-3
"""Smaller scores of a row of choices are FP32's own: they depend on the machine."""

_MANY = 4
"""A line of ``diff`` that so many answers share stands once."""

_SHOWN_LAYERS = 4
_ROW_OF_CHOICE = re.compile(r" {2,4}\S")
_TIMES = re.compile(r"\b\d[\d.,]* (ms|s|minutes?|hours?)\b")

Answer = Mapping[str, Any]


def golden(job: Job, folder: Path) -> dict[str, Any]:
    """A run's answer: exit code, what run.json says, and the words on the screen.

    Args:
        job: the run.
        folder: an empty folder, which gets the run's files.
    """
    out = folder / "out"
    command = [*job.command(folder), "--runner", "emulated", "--out", str(out)]
    _, model, _, inputs, *_ = command
    began = time.perf_counter()
    with (folder / "stdout").open("w") as said, (folder / "stderr").open("w") as told:
        ran = subprocess.Popen(
            [sys.executable, "-m", "bisect_trt", *command],
            cwd=ROOT,
            stdout=said,
            stderr=told,
            env={**os.environ, "COLUMNS": "4000", "NO_COLOR": "1"},
        )
        _, status, used = os.wait4(ran.pid, 0)
    ran.returncode = os.waitstatus_to_exitcode(status)
    found: dict[str, Any] = {"exit_code": ran.returncode}
    is_finished = (out / "run.json").is_file()
    if is_finished:
        found |= _answer(json.loads((out / "run.json").read_text()))
    screen = (folder / ("stdout" if is_finished else "stderr")).read_text()
    found["words"] = list(_words(screen, model, inputs, str(out)))
    if job.name in _LAYOUT:
        found |= _layout(out)
    measured = (round(time.perf_counter() - began, 1), used.ru_maxrss // 1024)
    return found | dict(zip(_MEASURED, measured, strict=True))


def _answer(said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of an answer that run.json has."""
    chosen = [choice["name"] for choice in said["choices"] if choice["recommended"]]
    repairs = Counter(edit["rule"] for edit in said["repairs"])
    yield "model", said["model_sha256"][:12]
    yield "cause", said["cause"]
    yield "causes", [cause["name"] for cause in said["causes"]]
    yield "verdict", said["verdict"]
    yield "recommended", chosen[0] if chosen else None
    yield "pinned", said["pinned"]
    yield "score", _score(said["score"])
    yield "choices", [_choice(choice) for choice in said["choices"]]
    yield "repairs", [f"{rule} {count}" for rule, count in repairs.items()]
    yield "findings", sorted({finding["kind"] for finding in said["findings"]})


def _score(score: Any) -> Any:
    return f"{score:.{SCORE_DIGITS}g}" if isinstance(score, float) else score


def _choice(choice: Mapping[str, Any]) -> str:
    """A row of choices: what it is, and its outcome; a score of noise has no digits."""
    kept, score = counted(choice["kept_fp32"], "layer"), choice["worst_score"]
    if isinstance(score, float):
        score = f"{score:.3g}" if score >= _NOISE else f"below {_NOISE}"
    return f"{choice['name']}: {kept} in FP32, passes {choice['passes']}, score {score}"


def _words(screen: str, model: str, inputs: str, out: str) -> Iterator[str]:
    """The lines of ``screen`` without times, paths and versions; choices are entries themselves."""
    for line in screen.splitlines():
        if not line.strip() or _ROW_OF_CHOICE.match(line):
            continue
        for path, name in ((out, "OUT"), (model, "MODEL"), (inputs, "INPUTS")):
            line = line.replace(path, name)
        line = _TIMES.sub(r"TIME \1", line.replace(__version__, "VERSION"))
        yield re.sub(r" {2,}", "  ", line.rstrip())


def _layout(out: Path) -> Iterator[tuple[str, Any]]:
    """The keys of run.json, the files of a run's folder and the columns of each CSV file."""
    files = sorted(path for path in out.glob("*") if path.is_file())
    yield "keys", sorted(json.loads((out / "run.json").read_text()))
    yield "files", [path.name for path in files]
    heads = {
        path.name: path.read_text().partition("\n")[0] for path in files if ".csv" in path.name
    }
    yield "columns", heads


def differences(before: Answer, after: Answer) -> list[str]:
    """What of an answer changed, a line each; what only one of them has does not count.

    Measurements do not count either.
    """
    lines = []
    for key in before:
        if key in after and key not in _MEASURED and before[key] != after[key]:
            changes = _changes(key, before[key], after[key])
            lines += [f"{'layers in FP32' if key == 'pinned' else key}: {c}" for c in changes]
    return lines


def _changes(key: str, before: Any, after: Any) -> list[str]:
    """How one value became another: of lists and tables what came (+) and went (-)."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        texts = ((name, before.get(name, ""), after.get(name, "")) for name in names)
        return [f"{n} {c}" for n, b, a in texts for c in _changes(key, b.split(","), a.split(","))]
    if isinstance(before, list) and isinstance(after, list):
        signed = [("+", [i for i in after if i not in before])]
        signed.insert(0, ("-", [item for item in before if item not in after]))
        if not any(items for _, items in signed):
            return ["another order"]
        if key in ("words", "choices"):
            return [f"{sign} {item}" for sign, items in signed for item in items]
        return [", ".join(_joined(sign, key, items) for sign, items in signed if items)]
    return [f"{before} -> {after}"]


def _joined(sign: str, key: str, items: list[str]) -> str:
    """Items that came or went; of many layers their number and the first."""
    if key != "pinned":
        return " ".join(f"{sign}{item}" for item in items)
    return f"{sign}{len(items)} ({some_of(items, _SHOWN_LAYERS)})"


class Comparison:
    """Counts and prints differences between answers."""

    def __init__(self) -> None:
        self.differing = 0
        self.kinds = Counter[str]()

    def count(self, lines: list[str]) -> None:
        """Counts an answer by the ``lines`` that differ."""
        self.differing += bool(lines)
        self.kinds.update(dict.fromkeys((line.partition(":")[0] for line in lines), 1))

    @staticmethod
    def show(name: str, lines: list[str], after: str = "") -> None:
        """Prints a run and what differs, a line each."""
        print(f"{name}{after}{'' if lines else ': same'}", flush=True)
        for line in lines:
            print(f"    {line}", flush=True)

    def conclude(self, compared: int) -> int:
        """Prints the sum; the exit code is 1 where something differs."""
        kinds = ", ".join(f"{kind} {number}" for kind, number in self.kinds.most_common())
        print(
            f"{self.differing} of {counted(compared, 'answer')} differ{f': {kinds}' * bool(kinds)}"
        )
        return int(self.differing > 0)


def made(jobs: list[Job], processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each run's name and answer, in order."""
    with ThreadPoolExecutor(processes) as pool:
        for job, answer in zip(jobs, pool.map(_made, jobs), strict=True):
            yield job.name, answer


def _made(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return golden(job, Path(folder))


def _refuse(what: str) -> NoReturn:
    """Ends the command for wrong usage."""
    print(what, file=sys.stderr)
    raise SystemExit(2)


def chosen_jobs(names: list[str], *, is_slow_too: bool) -> list[Job]:
    """The runs that ``names`` match, or all but the slow ones; says what is not on this machine.

    Raises:
        SystemExit: a name matches nothing.
    """
    jobs = list(every_job())
    for name in names:
        if not any(fnmatchcase(job.name, name) for job in jobs):
            _refuse(f"no run is called {name}; the names are in {FILE}")
    wanted = [
        job
        for job in jobs
        if any(fnmatchcase(job.name, name) for name in names)
        or (not names and (is_slow_too or not job.is_slow))
    ]
    if missing := [job.name for job in wanted if not job.is_here]:
        print(f"left out, as their files are not here: {', '.join(missing)}")
    return [job for job in wanted if job.is_here]


def answers_at(revision: str) -> dict[str, Answer]:
    """The answers in a file, or in the file as a revision of this repository has it.

    Raises:
        SystemExit: there is no such file or revision, or it has something else.
    """
    if Path(revision).is_file():
        content = Path(revision).read_bytes()
    else:
        command = ["git", "show", f"{revision}:{FILE}"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True)
        if shown.returncode:
            _refuse(f"{revision} is no file, and no revision that has {FILE}")
        content = shown.stdout
    try:
        answers = json.loads(content)
    except ValueError:  # nor is it UTF-8
        answers = None
    if not isinstance(answers, dict) or not all(isinstance(a, dict) for a in answers.values()):
        _refuse(f"{revision} has no answers as JSON; name a file that `write` made")
    return answers


def diff(before: str, after: str) -> int:
    """Prints what changed from one file or revision to another, answer by answer.

    An answer that only one of them has differs too. A line that is the same in many answers stands
    once, with their names.
    """
    old, new = answers_at(before), answers_at(after)
    both = [name for name in old if name in new]
    found = {name: differences(old[name], new[name]) for name in both}
    counts = Counter(line for lines in found.values() for line in lines)
    compared = Comparison()
    for name, lines in found.items():
        compared.count(lines)
        if own := [line for line in lines if counts[line] < _MANY]:
            compared.show(name, own)
    for line, number in counts.items():
        if number >= _MANY:
            print(f"{counted(number, 'answer')}, {line}")
            print(f"    {'; '.join(name for name in both if line in found[name])}")
    for what, names in (("new", new.keys() - old.keys()), ("gone", old.keys() - new.keys())):
        if names:
            print(f"{what}, {counted(len(names), 'answer')}: {'; '.join(sorted(names))}")
        for _ in names:
            compared.count([what])
    absent = Counter(entry for name in both for entry in old[name].keys() ^ new[name].keys())
    if absent:
        entries = ", ".join(f"{entry} ({absent[entry]})" for entry in sorted(absent))
        print(f"not compared, as one of the two lacks them: {entries}")
    return compared.conclude(len(old.keys() | new.keys()))


def write(jobs: list[Job], processes: int) -> int:
    """Makes answers and writes those that are new or differ, each as it comes.

    Answers of other names stay; those whose name no run has any more go.
    """
    known = json.loads(GOLDENS.read_text())
    order = [job.name for job in every_job()]
    compared = Comparison()
    for name, answer in made(jobs, processes):
        lines = differences(known[name], answer) if name in known else ["new"]
        if lines or known[name].keys() != answer.keys():
            known[name] = answer
        compared.count(lines)
        compared.show(name, lines, f" {answer['seconds']} s")
        ordered = {name: known[name] for name in order if name in known}
        write_whole(GOLDENS, json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    compared.conclude(len(jobs))
    return 0


def check(jobs: list[Job], processes: int) -> int:
    """Makes answers and prints how each differs from the file's."""
    known = json.loads(GOLDENS.read_text())
    compared = Comparison()
    for name, answer in made(jobs, processes):
        lines = differences(known[name], answer) if name in known else ["not in the file"]
        compared.count(lines)
        compared.show(name, lines, f" {answer['seconds']} s")
    return compared.conclude(len(jobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("command", nargs="?", choices=("check", "write", "diff"), default="check")
    parser.add_argument("names", nargs="*", help="patterns; for diff one or two revisions")
    parser.add_argument("--slow", action="store_true", help="runs that take minutes too")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    asked = parser.parse_args()
    if asked.processes < 1:
        parser.error("--processes must be at least 1")
    if asked.command == "diff":
        if len(asked.names) not in (1, 2):
            parser.error("diff takes one or two revisions or files")
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
        return diff(asked.names[0], asked.names[-1] if asked.names[1:] else str(GOLDENS))
    jobs = chosen_jobs(asked.names, is_slow_too=asked.slow)
    return {"check": check, "write": write}[asked.command](jobs, asked.processes)


if __name__ == "__main__":
    sys.exit(main())
