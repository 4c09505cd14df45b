"""How long report.html takes to write and to open, and how large it is: ``python -m
benchmarks.rendering``. Results are made up (``tests/report/synthetic.py``), with every section; the
browser is headless Chromium, the page opened once and its plots drawn one after the other.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.common import RESULTS, machine
from bisect_trt.report.html import as_html
from tests.report.synthetic import synthetic_result

SIZES = (200, 2_000, 20_000)
_WORDS = """\
Writing: from the result in memory to the text. Opening: from the browser's request until the answer
stands there and the table of all layers is filled. All plots: each drawn, as printing does; a
reader sees each when it comes near."""
_HEAD = "| layers | writing, s | file, MB | opening, s | all plots, s |"


def main() -> None:
    """Print the table and keep it in ``benchmarks/results/rendering.md``."""
    lines = [
        "# Writing and opening the report",
        "",
        f"`python -m benchmarks.rendering`, {machine()}",
        "",
        _WORDS,
        "",
        _HEAD,
        "| --- | --- | --- | --- | --- |",
    ]
    as_html(synthetic_result(20))  # the template is compiled once a process
    for count in SIZES:
        result = synthetic_result(count)
        began = time.perf_counter()
        page = as_html(result)
        written = time.perf_counter() - began
        megabytes = len(page.encode()) / 1e6
        opening, plots = opened(page)
        lines.append(f"| {count:,} | {written:.2f} | {megabytes:.2f} | {opening} | {plots} |")
        print(lines[-1], flush=True)
    (RESULTS / "rendering.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def opened(page: str) -> tuple[str, str]:
    """Seconds to open ``page`` and to draw its plots; words where there is no browser."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return ("no Chromium",) * 2
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto("about:blank")
        began = time.perf_counter()
        tab.goto(path.as_uri(), wait_until="commit")
        tab.wait_for_selector("html[data-ready=true]", timeout=120_000)
        ready = time.perf_counter() - began
        began = time.perf_counter()
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        for plot in tab.locator(".plot").all():
            plot.locator(".main-svg").first.wait_for(timeout=120_000)
        copied = time.perf_counter() - began
        browser.close()
    return f"{ready:.2f}", f"{copied:.2f}"


if __name__ == "__main__":
    main()
