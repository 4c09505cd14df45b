"""report.html in a real browser: what a reviewer sees, and what a hostile name cannot do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bisect_trt.base.display import printable
from bisect_trt.report.html import as_html
from tests.report.synthetic import HOSTILE, TRADEOFF, synthetic_result, with_choices

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)")

LAYERS = 400
PHONE = {"width": 375, "height": 700}


@dataclass
class Opened:
    """A page, and what it said or asked for."""

    page: sync_api.Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield opened
        opened.close()


def opened(browser: sync_api.Browser, path: Path, **options: object) -> Opened:
    page = browser.new_page(**options)
    found = Opened(page)
    page.on("console", lambda message: found.said.append(message.text))
    page.on("pageerror", lambda error: found.said.append(str(error)))
    page.on("dialog", lambda dialog: found.said.append("dialog"))
    page.on("request", lambda request: found.asked.append(request.url))
    page.goto(path.as_uri())
    if options.get("java_script_enabled", True):
        page.wait_for_selector("html[data-ready=true]")
    return found


def copied(found: Opened) -> None:
    """Unfold all and have every plot drawn, as printing does."""
    found.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    found.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    # Not wait_for_function: the page's policy forbids what it would evaluate.
    for plot in found.page.locator(".plot").all():
        plot.locator(".main-svg").first.wait_for()
    found.page.evaluate("dispatchEvent(new Event('afterprint'))")


@pytest.fixture(scope="module")
def usual(browser: sync_api.Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(as_html(with_choices(synthetic_result(LAYERS))), encoding="utf-8")
    found = opened(browser, path)
    copied(found)
    yield found
    found.page.close()


@pytest.fixture(scope="module")
def hostile(
    browser: sync_api.Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(as_html(with_choices(synthetic_result(40, HOSTILE))), encoding="utf-8")
    found = opened(browser, path, viewport=PHONE)
    copied(found)
    yield found
    found.page.close()


def rows(found: Opened) -> list[list[str]]:
    cells = "r => [...r.cells].map(c => c.textContent)"
    return found.page.eval_on_selector_all("#layer-table tbody tr", f"rs => rs.map({cells})")


def header(found: Opened, name: str) -> sync_api.Locator:
    return found.page.locator(f"#layer-table thead th[title='{name}'] .dt-column-order")


def search(found: Opened, text: str) -> None:
    found.page.get_by_label("Search names").fill(text)


def shows(found: Opened, count: int) -> None:
    """Wait until the table says so: it sorts and filters when it has the time."""
    sync_api.expect(found.page.locator(".dt-info")).to_contain_text(f" of {count} layers")


def sorts(found: Opened, name: str, was: str) -> list[str]:
    """The column ``name`` when its first cell is another than before."""
    place = [t["name"] for t in titles(found)].index(name)
    cell = found.page.locator(f"#layer-table tbody tr:first-child td:nth-child({place + 1})")
    sync_api.expect(cell).not_to_have_text(was)
    return [row[place] for row in rows(found)]


def column(found: Opened, name: str) -> list[str]:
    place = [t["name"] for t in titles(found)].index(name)
    return [row[place] for row in rows(found)]


def test_nothing_is_said_and_nothing_is_fetched(usual: Opened) -> None:
    assert usual.said == []
    assert [url for url in usual.asked if not url.startswith(("file:", "blob:", "data:"))] == []
    assert len([url for url in usual.asked if url.startswith("file:")]) == 1


def test_the_first_screen_answers(usual: Opened) -> None:
    page = usual.page
    page.evaluate("scrollTo(0, 0)")
    for part in ("#answer .choices", "#layers-plot", "#time-plot", "#build code"):
        box = page.locator(part).bounding_box()
        # Playwright's usual screen is 720 pixels high.
        assert box is not None and box["y"] + box["height"] <= 720, part
    text = page.locator("#answer").inner_text()
    for words in (
        "Keep 20 of 400 layers in FP32",
        "But output 'logits' holds NaN",
        "overflows",
        "no number",
        "0.81 \u00d7",
        "1.100",
        "64 of 64",
        "at least 95.9 % of all",
        "23 of 24",
        "16 of 16",
    ):
        assert words in text, words


POINTS = "p => [...p.querySelectorAll('.scatterlayer .point')].length"


def test_plots_have_their_points(usual: Opened) -> None:
    page = usual.page
    count = dict(page.eval_on_selector_all(".plot", f"ps => ps.map(p => [p.id, ({POINTS})(p)])"))
    pins = LAYERS // 20
    # Two lines, and three choices.
    assert count["layers-plot"] == count["time-plot"] == 2 * len(TRADEOFF) + 3
    assert count["errors-plot"] == pins + 4 + 1  # pins, layers that are not finite, a source
    assert count["ranges-plot"] == LAYERS  # the ends of the constants of each second layer
    drawn_lines = page.evaluate(
        "document.getElementById('errors-plot').data.slice(0, 2).map(t => t.y.length)"
    )
    assert drawn_lines == [LAYERS, LAYERS]


def test_the_table_sorts(usual: Opened) -> None:
    first = [float(v) for v in column(usual, "sensitivity")]
    assert first == sorted(first, reverse=True) and len(first) == 25
    was = column(usual, "ref_min")[0]
    header(usual, "ref_min").press("Enter")  # by keyboard, and negative numbers as numbers
    found = [float(v) for v in sorts(usual, "ref_min", was)]
    assert found == sorted(found, reverse=True)
    was = column(usual, "max_abs")[0]
    header(usual, "max_abs").click()
    found = sorts(usual, "max_abs", was)
    assert found[:4] == ["inf"] * 4 and float(found[4]) > float(found[5]) > 0.0
    header(usual, "sensitivity").click()


def titles(found: Opened) -> list[dict[str, str]]:
    return found.page.evaluate(
        "JSON.parse(document.getElementById('report-data').textContent).layers.columns"
    )


def test_the_table_filters(usual: Opened) -> None:
    page = usual.page
    shows(usual, LAYERS)
    search(usual, "layers.3.attn")
    shows(usual, 20)
    assert all("layers.3.attn" in name for name in column(usual, "layer"))
    search(usual, "net.py:137")  # by the place in the code
    shows(usual, 2)
    assert column(usual, "where") == ["net.py:137"] * 2
    search(usual, "")
    page.get_by_label("Operator").select_option("Pow")
    shows(usual, LAYERS // 5)
    assert set(column(usual, "op")) == {"Pow"}
    page.get_by_label("Operator").select_option("")
    for label, count in (("pinned", LAYERS // 20), ("sources of failure", 1), ("not finite", 4)):
        page.get_by_role("checkbox", name=label).check()
        shows(usual, count)
        page.get_by_role("checkbox", name=label).uncheck()
    shows(usual, LAYERS)


def test_a_layer_of_a_plot_is_found_in_the_table(usual: Opened) -> None:
    usual.page.evaluate(
        "document.getElementById('errors-plot').emit('plotly_click', "
        "{points: [{data: {}, x: 17, pointNumber: 17}]})"
    )
    shows(usual, 1)
    assert column(usual, "layer") == ["encoder.layers.0.mlp.Add_17"]
    search(usual, "")
    shows(usual, LAYERS)


def test_colours_follow_the_system(usual: Opened) -> None:
    page = usual.page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    sync_api.expect(page.locator("html")).to_have_class("dark")
    dark = page.evaluate(ground)
    assert dark != light
    text = "document.getElementById('layers-plot').layout.font.color"
    assert page.evaluate(text) == page.evaluate(
        "getComputedStyle(document.documentElement).getPropertyValue('--fg').trim()"
    )
    page.emulate_media(color_scheme="light")
    sync_api.expect(page.locator("html")).not_to_have_class("dark")
    assert page.evaluate(ground) == light


def test_a_phone_needs_no_sideways_scrolling(hostile: Opened) -> None:
    assert hostile.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_notebook_s_colours_are_kept(browser: sync_api.Browser) -> None:
    page = browser.new_page(viewport=PHONE)
    for text, ground in (("rgb(20, 20, 20)", "white"), ("rgb(238, 238, 238)", "rgb(17, 17, 17)")):
        shown = synthetic_result(40, HOSTILE)._repr_html_()
        page.set_content(f"<body style='color:{text};background:{ground}'>{shown}")
        colour = "e => getComputedStyle(e).color"
        assert page.locator(".verdict").evaluate(colour) == text
        assert page.locator(".held td").first.evaluate(colour) == text
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.close()


WORDS = ".xtick text, .ytick text, .g-xtitle text, .legendtext"


def test_plots_keep_their_words_on_a_phone(hostile: Opened) -> None:
    page = hostile.page
    for plot in page.locator(".plot").all():
        box = plot.bounding_box()
        edges = plot.evaluate(
            f"p => [...p.querySelectorAll('{WORDS}')]"
            ".map(t => [t.textContent, t.getBoundingClientRect()]).filter(t => t[1].width)"
            ".map(([words, r]) => [words, r.left, r.right, r.height])"
        )
        assert box is not None and edges
        for words, left, right, height in edges:
            assert box["x"] - 1.0 <= left and right <= box["x"] + box["width"] + 1.0, words
            assert height < 40.0, words  # nothing is turned
    assert page.locator(".plot .scrollbar[width='0']").count() == page.locator(".scrollbar").count()


def test_a_phone_breaks_no_counts(hostile: Opened) -> None:
    for cell in hostile.page.locator(".held td.whole").all():
        assert cell.evaluate("c => getComputedStyle(c).whiteSpace") == "nowrap"


def test_on_paper_there_are_no_controls(usual: Opened) -> None:
    page = usual.page
    page.emulate_media(media="print")
    controls = (".copy", ".filters", ".dt-search", ".dt-paging", "#more")
    hidden = [page.locator(s).first.is_visible() for s in controls]
    page.emulate_media(media="screen")
    assert hidden == [False] * len(controls)


def test_commands_are_copied(usual: Opened) -> None:
    usual.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    section = usual.page.locator("#build .copied")
    section.get_by_role("button").click()
    section.get_by_role("button", name="Copied").wait_for()
    copied = usual.page.evaluate("navigator.clipboard.readText()")
    assert copied == section.locator("code").text_content()
    assert "--minShapes=x:1x3x32x64" in copied and "--maxShapes=x:1x3x96x64" in copied


def test_names_show_as_text(hostile: Opened) -> None:
    page = hostile.page
    assert hostile.said == [] and page.evaluate("window.hurt") is None
    page.locator(".dt-length select").select_option("100")
    sync_api.expect(page.locator(".dt-info")).to_contain_text("1 to 40 of 40")
    told = set(column(hostile, "layer"))
    assert {printable(name) for name in HOSTILE} <= told
    assert page.locator("#layer-table img, #layer-table script, #layer-table b").count() == 0
    assert page.locator("h1").text_content().strip().startswith(HOSTILE[0])
    assert page.locator("#certificate td").first.text_content() == HOSTILE[0]
    # A browser that hid the escapes of what turns the direction would show another name.
    assert any("\\u202e" in name for name in told)


def test_names_show_as_text_in_plots(hostile: Opened) -> None:
    page = hostile.page
    for place in (0, 7):
        page.evaluate(
            "i => Plotly.Fx.hover('errors-plot', [{curveNumber: 0, pointNumber: i}])", place
        )
        label = page.locator("#errors-plot .hoverlayer").filter(has_text=HOSTILE[place][:20])
        label.wait_for()
    assert page.locator(".plot a[href^=javascript]").count() == 0


def test_a_script_that_came_in_anyway_does_not_run(hostile: Opened) -> None:
    page = hostile.page
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hurt = 1';"
        "document.body.append(s); }"
    )
    assert page.evaluate("window.hurt") is None
    assert any("Content Security Policy" in words for words in hostile.said)
    hostile.said.clear()


def test_without_scripts_the_answer_is_there(browser: sync_api.Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(as_html(synthetic_result(40)), encoding="utf-8")
    found = opened(browser, path, java_script_enabled=False)
    text = found.page.inner_text("body")
    found.page.close()
    assert "Keep 2 of 40 layers in FP32" in text and "need scripts" in text
