"""What pages name exists: options, commands; what is generated from the code says all of it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement

import bisect_trt
from bisect_trt.base import errors
from bisect_trt.base.outcomes import Cause
from bisect_trt.cli import main
from bisect_trt.settings import options
from tests.copies import EIGHT
from tests.docs.pages import DOCS, PAGES, ROOT, inline_code, name_of
from tests.docs.shell import OTHERS, ran


def options_of(command: click.Command) -> set[str]:
    return {"--help", *(o for p in command.params for o in p.opts if o.startswith("--"))}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_a_page_names_exist(page: Path) -> None:
    every = set().union({"--version"}, *map(options_of, main.commands.values()), *OTHERS.values())
    for code in inline_code(page):
        words = code.split()
        if words[0] in ("python", "make", "pip", "pre-commit"):
            continue
        known = every
        if words[0] == "bisect-trt" and len(words) > 1 and words[1].islower():
            known = options_of(main.commands[words[1]])
        named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", code))
        assert named <= known, f"{name_of(page)}: `{code}`: {named - known}"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """What the site is generated with; MkDocs is not needed for it."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_s_page_has_every_command_and_option(hooks: ModuleType) -> None:
    page = hooks.on_page_markdown((DOCS / "cli.md").read_text(), page_at("cli.md"))
    parts = dict(re.findall(r"^## (\S+)$(.*?)(?=^## |\Z)", page, flags=re.M | re.S))
    assert list(parts) == list(main.commands)
    for name, its in main.commands.items():
        assert its.help and its.help in parts[name]
        for option in options_of(its):
            assert f"`{option}`" in parts[name], (name, option)


def test_the_page_of_run_json_has_every_key(hooks: ModuleType) -> None:
    page = hooks.on_page_markdown((DOCS / "schema.md").read_text(), page_at("schema.md"))
    schema = json.loads(hooks.SCHEMA.read_text())
    for name, its in schema["properties"].items():
        assert f"| `{name}` |" in page
        for inner in its.get("properties", {}):
            assert f"| `{name}.{inner}` |" in page
    assert "| `validation.given.lower_bound` |" in page


def test_every_cause_and_exit_code_is_explained() -> None:
    page = (DOCS / "report.md").read_text()
    assert all(f"| `{cause}` |" in page for cause in Cause)
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert len(codes) > 5 and all(f"\n| {code} |" in page for code in codes)


def test_the_page_of_python_has_every_public_name(hooks: ModuleType) -> None:
    page = hooks.on_page_markdown((DOCS / "api.md").read_text(), page_at("api.md"))
    for name in bisect_trt.__all__:
        assert name == "__version__" or f"heading: {name}}}" in page
    for name, its in options().items():
        calls = page.count(f"| `{name}` | ")
        assert calls == len(its.commands & {"run", "verify", "reduce", "cure"}), name


WITHOUT_THE_SITE = {
    "cli.md": "bisect-trt COMMAND --help",
    "api.md": "help(bisect_trt.bisect)",
    "schema.md": "bisect_trt/report/schema/run.schema.json",
}


@pytest.mark.parametrize("name", WITHOUT_THE_SITE)
def test_a_page_that_is_generated_says_so_in_a_clone(name: str, hooks: ModuleType) -> None:
    source = (DOCS / name).read_text()
    said = re.search(r"<!-- generated: .* -->\n(\*.*\*)\n", source)
    assert said is not None and "`make docs` fills it" in said[1]
    assert f"`{WITHOUT_THE_SITE[name]}`" in said[1]
    built = hooks.on_page_markdown(source, page_at(name))
    assert "make docs" not in built and "<!-- generated" not in built


def test_the_site_shows_the_files_that_the_page_of_ci_links_to(hooks: ModuleType) -> None:
    source = (DOCS / "ci.md").read_text()
    built = hooks.on_page_markdown(source, page_at("ci.md"))
    for file in sorted((DOCS / "ci").iterdir()):
        assert f"](ci/{file.name})" in source and f"```yaml\n{file.read_text()}```" in built
    assert not any("--8<--" in page.read_text() for page in PAGES)


def test_links_lead_to_the_site_s_pages_or_to_none(hooks: ModuleType) -> None:
    text = (
        "[a](../benchmarks/results/validation.md) [b](../docs/repair.md#the-rules) "
        "[c](../CHANGELOG.md) [d](../Makefile) [e](https://example.org)"
    )
    assert hooks.on_page_markdown(text, page_at("index.md")) == (
        "[a](figures/validation.md) [b](repair.md#the-rules) "
        "[c](changelog.md) d (`Makefile`) [e](https://example.org)"
    )
    problem = "[a](../../benchmarks/results/validation.md) [b](README.md) [c](../report.md)"
    assert hooks.on_page_markdown(problem, page_at("cases/5-clip.md")) == (
        "[a](../figures/validation.md) [b](README.md) [c](../report.md)"
    )


def page_at(uri: str) -> Any:
    """A page as MkDocs hands it over, as far as it is looked at."""

    class Page:
        class file:  # noqa: N801
            src_uri = uri

    return Page


def scripts_of(value: Any) -> list[str]:
    """The shell lines of a CI's file, in order."""
    if isinstance(value, list):
        return [line for each in value for line in scripts_of(each)]
    if not isinstance(value, dict):
        return []
    own = [value.get("run", []), value.get("script", [])]
    lines = [line for its in own for line in ([its] if isinstance(its, str) else its)]
    return lines + [line for its in value.values() for line in scripts_of(its)]


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_ci_examples_run(
    name: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line but for the installation, whose address is the reader's."""
    monkeypatch.chdir(shutil.copytree(workshop, tmp_path / "here", symlinks=True))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    text = (DOCS / "ci" / name).read_text()
    install, *lines = scripts_of(yaml.safe_load(text))
    quoted = re.fullmatch(r'pip install "(.+)"', install)
    assert quoted is not None and Requirement(quoted[1]).name == "bisect-trt"
    assert lines[0] == "bisect-trt gate"
    for line in lines:
        ran(line, name, EIGHT)
    assert Path("reports/gate/junit.xml").exists() and Path("reports/gate/gate.md").exists()
    its = yaml.safe_load(text)
    if "jobs" in its:
        steps = its["jobs"]["gate"]["steps"]
        load, save = (
            next(s for s in steps if s.get("uses", "").startswith(f"actions/cache/{what}@"))
            for what in ("restore", "save")
        )
        assert save["if"] == "always()" and save["with"]["path"] == load["with"]["path"]
        assert save["with"]["key"] == load["with"]["key"]  # one that no run before has taken
        assert "github.run_attempt" in save["with"]["key"] and "if" not in load
    else:
        assert its["precision"]["cache"]["when"] == "always"
    cached = sorted(set(re.findall(r"^[^!]*?(reports/gate/\*\S+)$", text, flags=re.M)))
    assert cached == ["reports/gate/*/cache.sqlite"] and list(Path().glob(cached[0]))
    if "SUMMARY" in text:
        summary = (tmp_path / "summary.md").read_text()
        assert summary == Path("reports/gate/gate.md").read_text() != ""
        Path("reports/gate/gate.md").unlink()  # a bisect.toml that cannot be read leaves none
        ran(next(line for line in lines if "SUMMARY" in line), name, EIGHT)
        assert (tmp_path / "summary.md").read_text() == summary


LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("page", (*PAGES, ROOT / "CONTRIBUTING.md"), ids=name_of)
def test_links_in_the_repository_lead_somewhere(page: Path) -> None:
    """With their anchors; in the site MkDocs checks them."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        meant = (page.parent / target).resolve() if target else page
        assert meant.exists(), f"{name_of(page)}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", meant.read_text(encoding="utf-8"), flags=re.M)
            slugs = {
                re.sub(r"[^\w\s-]", "", head).strip().lower().replace(" ", "-") for head in heads
            }
            assert anchor in slugs, f"{name_of(page)}: {target}#{anchor}"
