"""How a command ends, whoever reads, whatever the machine does: real processes."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.atomic_files import RESULT_FILES, draft_prefix, sweep
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import STOPPING, is_stop
from bisect_trt.report.exits import guarded
from bisect_trt.steps.run_folder import held_folder
from fixtures.__main__ import input_bytes
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import residual
from tests.command import call, saved
from tests.conftest import HANG_S, without_progress
from tests.networks import parsed

COMMAND = [sys.executable, "-m", "bisect_trt"]


def files(folder: Path, fixture: Fixture | None = None) -> list[str]:
    fixture = fixture or encoder_decomposed()
    return [*saved(fixture, folder), "--requirement", fixture.require, "--robust", "0"]


def spawned(arguments: list[str], shell: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; ``shell`` is what stands behind it on a shell's line."""
    words = " ".join(f"'{a}'" for a in [*COMMAND, *arguments])
    more.setdefault("env", plain_environment())
    ended = subprocess.run(
        ["bash", "-c", f"{words} {shell}"], capture_output=True, text=True, timeout=HANG_S, **more
    )
    ended.stderr = without_progress(ended.stderr)
    return ended


def plain_environment() -> dict[str, str]:
    """Without what measures coverage in children: it writes files and imports of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    """A model, its input and a run of it."""
    folder = tmp_path_factory.mktemp("done")
    arguments = files(folder)
    out = folder / "run"
    assert call("run", *arguments, "--out", str(out), "--quiet").exit_code == 0
    yield arguments, out


READERS = {
    "goes away": "| true; exit ${PIPESTATUS[0]}",
    "reads a line": "| head -1 > /dev/null; exit ${PIPESTATUS[0]}",
    "is a full disk": "> /dev/full",
    "is closed": ">&-",
    "is closed, errors too": ">&- 2>&-",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("validation", [True, False])
def test_exit_codes_do_not_depend_on_who_reads(
    reader: str, validation: bool, done: tuple[list[str], Path], tmp_path: Path
) -> None:
    (model, _, inputs, *_), out = done
    require = ["--requirement", "rel_range<=1e-2" if validation else "rel_range<=1e-9"]
    plan = ["--plan", str(out / "plan.json"), "--out", str(tmp_path / "verify"), "--robust", "0"]
    ended = spawned(["verify", model, "--input", inputs, *plan, *require], READERS[reader])
    assert ended.returncode == (0 if validation else 1), ended.stderr
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    if reader == "is a full disk":
        assert "standard output cannot be written (No space left on device)" in ended.stderr


@pytest.mark.parametrize("command", ["run", "compare", "inspect", "doctor", "export", "dry"])
def test_every_command_bears_a_reader_that_goes_away(
    command: str, done: tuple[list[str], Path], tmp_path: Path
) -> None:
    arguments, out = done
    model, plan = arguments[0], str(out / "plan.json")
    whole = {
        "run": ["run", *arguments, "--out", str(tmp_path), "--json"],
        "dry": ["run", *arguments, "--dry-run"],
        "compare": ["compare", *arguments[:-2], "--out", str(tmp_path)],
        "inspect": ["inspect", model, "--json"],
        "doctor": ["doctor"],
        "export": ["export", model, "--plan", plan, "--format", "trtexec"],
    }[command]
    ended = spawned(whole, READERS["goes away"])
    said = [line for line in ended.stderr.splitlines() if not line.startswith("note: ")]
    assert ended.returncode == 0 and said == [], ended.stderr
    if command == "export":
        lost = spawned(whole, "> /dev/full")
        assert lost.returncode == 4 and "No space left" in lost.stderr


def test_an_ascii_locale_is_enough(tmp_path: Path) -> None:
    model = encoder_decomposed().model
    model.graph.node[0].name = "schicht-ä-层-\U0001f600"
    onnx.save(model, tmp_path / "modèle.onnx")
    (tmp_path / "x.npz").write_bytes(input_bytes(encoder_decomposed()))
    ascii_only = {
        **plain_environment(),
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
    }
    arguments = [str(tmp_path / "modèle.onnx"), "--input", str(tmp_path / "x.npz"), "-v"]
    out = tmp_path / "ergebnis-é"
    ended = spawned(["run", *arguments, "--out", str(out), "--robust", "0"], env=ascii_only)
    assert ended.returncode in (0, 1) and "Traceback" not in ended.stderr, ended.stderr
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "schicht-ä-层-\U0001f600" in page
    plan = ["--plan", str(out / "plan.json"), "--out", str(tmp_path / "v"), "--robust", "0"]
    assert spawned(["verify", *arguments[:-1], *plan], env=ascii_only).returncode in (0, 1)
    assert spawned(["inspect", arguments[0]], env=ascii_only).returncode == 0


def test_ctrl_c_during_the_imports_is_one_line() -> None:
    for delay in (0.05, 0.2, 0.4, 0.7):
        process = subprocess.Popen(
            [*COMMAND, "doctor"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=plain_environment(),
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=HANG_S)
        # Before the interpreter has come to our first line it answers by itself; a machine that
        # stood still may be done before the signal comes.
        ours = process.returncode != 0 and ("in entry" in words or "bisect-trt" in words)
        if ours:
            assert process.returncode == 130 and words.startswith("bisect-trt: interrupted"), words
            assert len(words.splitlines()) == 1, words


def test_ctrl_c_while_options_are_read_is_one_line() -> None:
    """click makes an error of its own of it, which would end as a requirement that is missed."""
    script = (
        "import os, signal, click.core\n"
        "def stopped(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "click.core.Option.process_value = stopped\n"
        "from bisect_trt.__main__ import entry\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "entry()\n"
    )
    command = [sys.executable, "-c", script, "run", "m.onnx"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=plain_environment(), check=False
    )
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.strip() == "bisect-trt: interrupted"


def test_an_error_that_ctrl_c_made_is_an_interruption() -> None:
    """Out of a lock that was being taken comes a RuntimeError."""

    def raised(cause: BaseException | None) -> BaseException:
        try:
            try:
                raise cause or ValueError("a slip")
            except BaseException:
                raise RuntimeError("cannot release un-acquired lock")  # noqa: B904 - as a lock does
        except RuntimeError as error:
            return error

    assert is_stop(raised(KeyboardInterrupt())) and not is_stop(raised(None))
    STOPPING.set()
    try:
        assert is_stop(raised(None))
    finally:
        STOPPING.clear()


@pytest.mark.parametrize("where", ["destructor", "callback"])
def test_ctrl_c_while_an_object_is_freed_is_not_lost(where: str) -> None:
    """Nothing can be raised there: the run went on, with a line about what was ignored."""
    script = (
        "import os, signal, time, weakref\n"
        "from bisect_trt.report.exits import guarded\n"
        "def interrupt(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
        "class Freed:\n"
        f"    {'__del__ = interrupt' if where == 'destructor' else 'pass'}\n"
        "@guarded\n"
        "def command():\n"
        "    freed = Freed()\n"
        f"    watch = weakref.ref(freed, interrupt) if {where == 'callback'} else None\n"
        "    del freed\n"
        f"    time.sleep({HANG_S})\n"
        "command()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=plain_environment(),
        timeout=HANG_S / 2,
    )
    assert done.returncode == 130
    assert done.stderr == "bisect-trt: interrupted; nothing was kept\n"


@pytest.mark.parametrize(("raised", "code"), [("from KeyboardInterrupt()", 130), ("", 4)])
def test_ctrl_c_that_an_extension_made_an_import_error_of(raised: str, code: int) -> None:
    """ONNX Runtime's does, where the signal comes while it is being loaded."""
    script = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'bisect_trt.cli':\n"
        f"            raise ImportError('initialization failed') {raised}\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from bisect_trt.__main__ import entry\n"
        "entry()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=plain_environment()
    )
    assert done.returncode == code
    assert (done.stderr == "bisect-trt: interrupted\n") is (code == 130)
    assert ("initialization failed" in done.stderr) is (code == 4)
    assert done.stderr.splitlines()[-1].startswith("bisect-trt: ")


def _limited(kind: int, size: int) -> Any:
    return lambda: resource.setrlimit(kind, (size, size))


@pytest.mark.parametrize("kilobytes", [1, 40, 200])
def test_a_full_disk_loses_nothing(kilobytes: int, tmp_path: Path) -> None:
    """Files may grow to so many kB: what a full disk does to one."""
    arguments = ["run", *files(tmp_path), "--out", str(tmp_path / "run")]
    full = spawned(arguments, preexec_fn=_limited(resource.RLIMIT_FSIZE, kilobytes * 1024))
    assert full.returncode == 4, full.stderr
    assert len(full.stderr.splitlines()) == 1 and "disk" in full.stderr, full.stderr
    left = {p.name for p in (tmp_path / "run").iterdir()} if (tmp_path / "run").exists() else set()
    assert not left & set(RESULT_FILES), "no file of a result, rather than some"
    again = call(*arguments)
    assert again.exit_code == 0 and (tmp_path / "run" / "run.json").exists()
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["requirements"]


def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    x = np.zeros((64, 1024, 1024), np.float32)
    np.save(tmp_path / "x.npy", x)
    shape = "float[64, 1024, 1024]"
    onnx.save(parsed("[exp] y = Exp(x)", f"{shape} x", f"{shape} y"), tmp_path / "m.onnx")
    arguments = [str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npy"), "--robust", "0"]
    ended = spawned(
        ["run", *arguments, "--out", str(tmp_path / "run")],
        preexec_fn=_limited(resource.RLIMIT_AS, 1_900_000_000),
    )
    assert ended.returncode == 4 and "memory" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_second_run_in_one_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with held_folder(out):
        second = spawned(["run", *files(tmp_path), "--out", str(out)])
    assert second.returncode == 2 and "another run is using this folder" in second.stderr
    assert not list(out.iterdir())


def test_a_run_that_ends_early_leaves_no_file_of_an_earlier_one(
    done: tuple[list[str], Path], tmp_path: Path
) -> None:
    arguments, out = done[0], tmp_path / "run"
    shutil.copytree(done[1], out)
    assert {"run.json", "model.typed.onnx", "report.html"} <= {p.name for p in out.iterdir()}
    again = [*COMMAND, "run", *arguments[:-2], "--precision", "bf16", "--out", str(out)]

    def left() -> set[str]:
        return {p.name for p in out.iterdir()} & set(RESULT_FILES)

    for _ in range(5):
        process = subprocess.Popen(again, stderr=subprocess.PIPE)
        while left() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        # Where this test stood still meanwhile, the run has come to its end: once more.
        if process.returncode == -signal.SIGKILL:
            break
    assert not left()


@pytest.mark.parametrize("name", ["model.typed.onnx", "cache.sqlite", "model.rewritten.onnx"])
def test_the_source_model_is_never_written_over(name: str, tmp_path: Path) -> None:
    arguments = files(tmp_path)
    (tmp_path / "m.onnx").rename(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    result = call("run", str(tmp_path / name), *arguments[1:], "--out", str(tmp_path))
    assert result.exit_code == 2 and "would be written over" in result.output
    assert (tmp_path / name).read_bytes() == before


def test_exports_are_never_written_over_what_is_read(
    done: tuple[list[str], Path], tmp_path: Path
) -> None:
    (model, *_), out = done
    for target in (model, str(out / "plan.json"), str(Path(model).parent / "." / "m.onnx")):
        before = Path(target).read_bytes()
        for form in ("onnx", "trtexec", "polygraphy"):
            plan = ["--plan", str(out / "plan.json"), "--format", form, "-o", target]
            result = call("export", model, *plan)
            assert result.exit_code == 2 and "would be written over" in result.output
            assert Path(target).read_bytes() == before
    link = tmp_path / "link.onnx"
    link.symlink_to(model)
    plan = ["--plan", str(out / "plan.json"), "--format", "onnx", "-o", str(link)]
    assert call("export", model, *plan).exit_code == 2


def test_exports_go_to_regular_files_alone(done: tuple[list[str], Path], tmp_path: Path) -> None:
    (model, *_), out = done
    plan = ["export", model, "--plan", str(out / "plan.json"), "--format"]
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", tmp_path, Path("/dev/null"), Path(".")):
        for form in ("onnx", "trtexec"):
            result = call(*plan, form, "-o", str(target))
            assert result.exit_code == 2 and "not a regular file" in result.output
    assert (tmp_path / "pipe").is_fifo() and Path("/dev/null").is_char_device()
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    assert call(*plan, "trtexec", "-o", str(tmp_path / "link.txt")).exit_code == 0
    assert (tmp_path / "link.txt").is_symlink() and "--fp16" in (tmp_path / "real.txt").read_text()


def test_wrong_usage_is_2_also_where_nobody_reads() -> None:
    assert spawned(["run"], "2> /dev/full").returncode == 2
    assert spawned(["nothing"], "2> /dev/full").returncode == 2
    lost = spawned(["--help"], "> /dev/full")
    assert lost.returncode == 4 and "Traceback" not in lost.stderr


def test_a_folder_in_a_result_s_place_is_told_before_any_work(tmp_path: Path) -> None:
    arguments = files(tmp_path)
    (tmp_path / "run" / "plan.json").mkdir(parents=True)
    result = call("run", *arguments, "--out", str(tmp_path / "run"))
    assert result.exit_code == 2 and "plan.json there is no file" in result.output


def test_files_that_no_run_wrote_are_left_alone(tmp_path: Path) -> None:
    arguments = files(tmp_path)
    for name in ("report.html", "plan.json", "layers.csv"):
        out = tmp_path / name.replace(".", "_")
        out.mkdir()
        (out / name).write_text("mine")
        result = call("run", *arguments, "--out", str(out))
        assert result.exit_code == 2 and "may not be a run's" in result.output
        assert (out / name).read_text() == "mine" and len(list(out.iterdir())) == 1


@pytest.mark.parametrize("option", ["--out", "--golden", "--input", "--holdout"])
def test_an_empty_path_is_not_this_folder(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = files(tmp_path)
    result = call("run", *arguments, option, "")
    assert result.exit_code == 2 and "empty" in result.output, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "x.npz"]
    with pytest.raises(BadInputError, match="empty"):
        bisect_trt.bisect(arguments[0], str(tmp_path / "x.npz"), out="")


def test_two_models_of_one_name_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pins = []
    for folder, fixture in (("one", encoder_decomposed()), ("other", residual())) * 2:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = files(tmp_path / folder, fixture)
        result = call("run", *arguments, "--json")
        assert result.exit_code == 0, result.output
        pins.append(json.loads(result.stdout)["pinned"])
    folders = sorted(p.name for p in (tmp_path / "reports").iterdir())
    assert len(folders) == 2 and folders[0] == "m-fp16" and folders[1].startswith("m-fp16-")
    saved = [
        json.loads((tmp_path / "reports" / name / "plan.json").read_text())["pinned"]
        for name in folders
    ]
    assert sorted(map(sorted, saved)) == sorted(map(sorted, pins[:2])) and pins[:2] == pins[2:]


def test_what_killed_runs_left_is_swept_away(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    alive = tmp_path / f"{draft_prefix()}y"
    dead = tmp_path / alive.name.replace(f"-{os.getpid()}-", f"-{gone.pid}-")
    elsewhere = tmp_path / f".bisect-trt-00000000-{gone.pid}-x"
    other = tmp_path / ".bisect-trt-notes"
    for folder in (dead, alive, elsewhere, other):
        folder.mkdir()
        (folder / "big.bin").write_bytes(b"0" * 1000)
    sweep(tmp_path)
    assert not dead.exists() and alive.exists() and other.exists() and elsewhere.exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), "no more threads"),
        (
            RuntimeError("[ONNXRuntimeError] pthread_create failed, error code: 11"),
            "no more threads",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (MemoryError(), "out of memory"),
    ],
)
def test_what_a_machine_lacks_is_no_internal_error(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        guarded(command)()
    assert ended.value.code == 4
    told = capsys.readouterr().err
    assert words in told and len(told.splitlines()) == 1
