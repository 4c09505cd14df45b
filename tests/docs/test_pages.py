"""Every command of the documentation is run, in the order of its page; what a page says that there
is, is there.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from bisect_trt.report.record import read_run
from fixtures.__main__ import FILES
from fixtures.cases import AUGMENTED
from tests.copies import EIGHT, FEWEST
from tests.docs.pages import CASES_RUN, PAGES, ROOT, SHELL, blocks_of, inline_code, name_of
from tests.docs.shell import AS_WRITTEN, asks_for_what_is_there, ran
from tests.test_cases import is_the_answer

RUN = [p for p in PAGES if any(b.language in (*SHELL, "python") for b in blocks_of(p))]

NOT_MADE = {"engines.csv", "cures.csv", "model.cured.onnx"}
NOT_MADE |= {"x.npz", "inputs.json", "model.fitted.onnx", "layers.json"}
"""Files that pages speak of: an engine or other models make them, or they are the reader's."""

_FILE = re.compile(r"[\w./*-]+\.(?:onnx|json|html|md|csv|xml|sqlite|npz|toml|yml)")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_what_a_page_tells_to_do_works(
    page: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = FEWEST if name_of(page) in AS_WRITTEN else EIGHT
    folder = shutil.copytree(workshop, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(folder)
    said = ""
    for block in blocks_of(page):
        if block.title:
            if block.language in ("python", "toml"):
                Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, f"{name_of(page)}:{block.line}", "exec"), {})
        elif block.language in SHELL and block.needs:
            for command in block.commands:
                asks_for_what_is_there(command)
        elif block.language in SHELL:
            said = "".join(ran(command, name_of(page), limits) for command in block.commands)
        elif block.language == "text" and said:
            first = re.split(r"\.\.\.|[;.] |[;.]$", " ".join(block.text.split("\n")[0].split()))[0]
            assert first in " ".join(said.split()), f"{name_of(page)}:{block.line}: {first}"
            said = ""
    for made in map(Path, CASES_RUN):
        if made.exists():
            is_the_answer(read_run(made), AUGMENTED[CASES_RUN[str(made)]]())
    for name in {n for n in inline_code(page) if _FILE.fullmatch(n)} - NOT_MADE:
        found = any((at / name).exists() for at in (folder, ROOT, page.parent, FILES))
        assert found or any(folder.rglob(Path(name).name)), f"{name_of(page)} speaks of {name}"
