"""References beyond what is kept in memory lie on disk, and are not computed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.references import References
from bisect_trt.model.graph import Graph
from bisect_trt.runners.reference import Reference
from fixtures.models import healthy


def test_each_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = healthy()
    reference, asked = Reference(Graph(fixture.model)), []
    compute = reference.outputs

    def counted(sample: Sample) -> dict[str, np.ndarray]:
        asked.append(sample.name)
        return dict(compute(sample))

    monkeypatch.setattr(reference, "outputs", counted)
    folder = tmp_path / "references.tmp"
    folder.mkdir()
    (folder / "left.npz").write_text("what a killed run left")
    found = References(reference, folder, memory_bytes=1)
    assert not folder.exists()
    name, array = next(iter(fixture.inputs.items()))
    samples = [Sample(str(i), {name: array + np.float32(i)}) for i in range(4)]
    first = [found.of(s) for s in samples]
    again = [found.of(s) for s in samples]
    assert asked == ["0", "1", "2", "3"]
    for one, other in zip(first, again, strict=True):
        assert list(one) == list(other)
        assert all(np.array_equal(one[n], other[n]) for n in one)
    assert len(list(folder.iterdir())) == 4
    found.close()
    assert not folder.exists()


def test_what_is_drawn_may_come_from_elsewhere(tmp_path: Path) -> None:
    fixture = healthy()
    name, array = next(iter(fixture.inputs.items()))
    asked: list[str] = []

    def quick(sample: Sample) -> dict[str, np.ndarray]:
        asked.append(sample.name)
        return {"quick": np.zeros(1, np.float32)}

    found = References(Reference(Graph(fixture.model)), tmp_path)
    found.use_for_copied(quick)
    given, copied = Sample("given", {name: array}), Sample("drawn", {name: array + 1}, True)
    assert "quick" not in found.of(given) and "quick" in found.of(copied)
    assert "quick" in found.of(copied) and asked == ["drawn"]
    assert found.at_once(copied) == 1


@pytest.mark.parametrize("is_large", [False, True])
def test_only_a_large_model_s_session_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """Another needs the room, and copies follow the given inputs."""
    fixture = healthy()
    reference, released = Reference(Graph(fixture.model)), []
    monkeypatch.setattr(reference, "release", lambda: released.append(True))
    monkeypatch.setattr(reference, "is_large", is_large)
    found = References(reference, tmp_path)
    found.prepare([Sample("given", fixture.inputs)], lambda: None)
    assert len(released) == is_large


def test_what_was_drawn_takes_no_more_of_the_disk_than_is_said(tmp_path: Path) -> None:
    """A model with outputs of 4 MB filled the disk by 900 MB in eight seconds."""
    fixture = healthy()
    name, array = next(iter(fixture.inputs.items()))
    given = Sample("given", {name: array})
    one = sum(a.nbytes for a in Reference(Graph(fixture.model)).outputs(given).values())
    reference, folder = Reference(Graph(fixture.model)), tmp_path / "kept"
    found = References(reference, folder, memory_bytes=0, copies_bytes=3 * one)
    copied = [Sample(str(n), {name: array + np.float32(n + 1)}, True) for n in range(8)]
    for sample in (given, *copied):
        found.of(sample)
    left = {path.name for path in (tmp_path / "kept").iterdir()}
    assert left == {given.digest, *(s.digest for s in copied[:3])}
    assert found.of(copied[0]).keys() == found.of(given).keys()
