"""No answer changes unseen: what the goldens hold, and what is said of a difference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.golden_jobs import Job, every_job
from benchmarks.goldens import GOLDENS, ROOT, differences, golden
from fixtures.models import healthy

BEFORE = {
    "gone": {"exit_code": 0},
    **{name: {"cause": "none"} for name in "wxyz"},
    "kept": {"exit_code": 0, "pinned": ["a"], "seconds": 1.0},
    "model": {
        "exit_code": 0,
        "causes": ["overflow"],
        "verdict": "validated",
        "recommended": "plan",
        "pinned": ["a", "b"],
        "score": "0.5",
        "words": ["VALIDATED with 2 layers", "Report  OUT/report.html"],
    },
}
AFTER = {
    "kept": {"exit_code": 0, "pinned": ["a"], "seconds": 9.0, "words": ["VALIDATED"]},
    "model": {
        "exit_code": 1,
        "causes": ["overflow", "underflow"],
        "verdict": None,
        "recommended": "repaired",
        "pinned": ["b", *"cdefgh"],
        "score": "0.500001",
        "words": ["CANNOT BE MET", "Report  OUT/report.html"],
    },
    "came": {"exit_code": 0},
    **{name: {"cause": "rounding"} for name in "wxyz"},
}
SAID = """model
    exit_code: 0 -> 1
    causes: +underflow
    verdict: validated -> None
    recommended: plan -> repaired
    layers in FP32: -1 (a), +6 (c, d, e, f and 2 more)
    score: 0.5 -> 0.500001
    words: - VALIDATED with 2 layers
    words: + CANNOT BE MET
4 answers, cause: none -> rounding
    w; x; y; z
new, 1 answer: came
gone, 1 answer: gone
not compared, as one of the two lacks them: words (1)
7 of 8 answers differ: cause 4, exit_code 1, causes 1, verdict 1, recommended 1, """


def diff(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.goldens", "diff", *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_diff_says_what_changed_between_two_files(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(BEFORE))
    after.write_text(json.dumps(AFTER))
    found = diff(str(before), str(after))
    assert (found.returncode, found.stderr) == (1, "")
    assert found.stdout == f"{SAID}layers in FP32 1, score 1, words 1, new 1, gone 1\n"
    same = diff(str(before), str(before))
    assert (same.returncode, same.stdout) == (0, "0 of 7 answers differ\n")


def test_diff_refuses_what_is_neither_a_file_nor_a_revision() -> None:
    found = diff("no-such-version")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("no-such-version is no file") and found.stderr.count("\n") == 1


def test_an_answer_that_came_or_went_differs(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps({"kept": {}}))
    after.write_text(json.dumps({"kept": {}, "came": {}}))
    for names, word in (((before, after), "new"), ((after, before), "gone")):
        found = diff(*map(str, names))
        assert found.returncode == 1
        assert found.stdout.endswith(f"1 of 2 answers differ: {word} 1\n")


@pytest.mark.parametrize("content", [b"", b"no JSON", b"\xff\xfe{", b"[1]", b'{"a": 1}'])
def test_diff_refuses_a_file_without_answers(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some.json"
    file.write_bytes(content)
    found = diff(str(file))
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"{file} has no answers") and found.stderr.count("\n") == 1


def test_a_run_is_as_in_the_file_and_a_changed_requirement_is_seen(tmp_path: Path) -> None:
    known = json.loads(GOLDENS.read_text(encoding="utf-8"))["healthy, defaults"]
    fixture, answers = healthy(), []
    for limit in ("1e-2", "1e-6"):
        folder = tmp_path / limit
        folder.mkdir()
        arguments = ("--requirement", f"max_abs<={limit}")
        job = Job("of a test", fixture.model, [fixture.inputs], arguments)
        answers.append(golden(job, folder))
    same, stricter = answers
    assert same.keys() == known.keys()
    # The last digits of a score may be another machine's.
    for key in ("exit_code", "cause", "verdict", "recommended", "pinned", "words"):
        assert same[key] == known[key]
    assert str(tmp_path) not in json.dumps(answers)
    changed = {line.partition(":")[0] for line in differences(same, stricter)}
    assert changed >= {"recommended", "layers in FP32", "words"}


def test_every_run_has_its_answer_and_every_answer_its_run() -> None:
    jobs = [job.name for job in every_job()]
    assert list(json.loads(GOLDENS.read_text(encoding="utf-8"))) == jobs
