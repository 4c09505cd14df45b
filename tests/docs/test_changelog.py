"""The changelog stays short: what a user gained, in bullets that are read at a glance."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name_of

MAX_WORDS = 25
MAX_BULLETS = 40
CHANGELOG = ROOT / "CHANGELOG.md"
FRAGMENTS = sorted(p for p in (ROOT / "changes").glob("*.md") if p.name != "README.md")
TYPES = "added|changed|fixed|removed"

VERSIONS = re.split(r"^## ", CHANGELOG.read_text(encoding="utf-8"), flags=re.M)[1:]


def bullets_of(text: str) -> Iterator[str]:
    """The bullets of ``text``, continued lines joined."""
    for bullet in re.findall(r"^- (.+(?:\n .+)*)", text, flags=re.M):
        yield " ".join(bullet.split())


@pytest.mark.parametrize("version", VERSIONS, ids=lambda text: text.split()[0])
def test_a_version_opens_with_a_paragraph_and_has_few_short_bullets(version: str) -> None:
    bullets = list(bullets_of(version))
    assert version.splitlines()[2][0].isalnum(), "a paragraph comes before the bullets"
    assert 0 < len(bullets) <= MAX_BULLETS
    assert [b for b in bullets if len(b.split()) > MAX_WORDS] == []


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=name_of)
def test_a_fragment_becomes_one_short_bullet(fragment: Path) -> None:
    text = fragment.read_text(encoding="utf-8")
    assert re.fullmatch(rf"\d+\.(?:{TYPES})(?:\.\d+)?\.md", fragment.name)
    assert text[0].isalnum() or text[0] == "`", "towncrier adds the bullet"
    assert len(text.split()) < MAX_WORDS, "the issue's number is a word too"


def test_towncrier_finds_the_place_and_the_types() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    towncrier = settings["tool"]["towncrier"]
    above, _, below = CHANGELOG.read_text(encoding="utf-8").partition(towncrier["start_string"])
    assert "\n## " not in above and below.startswith("\n## ")
    assert "|".join(kind["directory"] for kind in towncrier["type"]) == TYPES
