"""Inputs in the forms that people have them in, through the real loader."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bisect_trt.base.atomic_files import unchanged
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.sample import LazyArrays, RecentArrays
from bisect_trt.inputs.files import find_files
from bisect_trt.inputs.samples import load_samples
from bisect_trt.model.inputs import InputSpec

SPECS = [InputSpec("x", np.dtype(np.float32), (1, 4))]
IMAGES = [InputSpec("pixels", np.dtype(np.float32), ("n", 3, 8, 10))]
TWO = [*SPECS, InputSpec("y", np.dtype(np.int64), (2,))]


def rows(count: int) -> np.ndarray:
    return np.arange(4 * count, dtype=np.float32).reshape(count, 1, 4)


def as_polygraphy(array: np.ndarray) -> dict[str, str]:
    """An array as polygraphy 0.53 saves it: an .npy file in base 64."""
    data = io.BytesIO()
    np.save(data, array)
    text = base64.b64encode(data.getvalue()).decode()
    return {"array": text, "polygraphy_class": "ndarray"}


def test_a_folder_may_hold_every_kind(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=rows(1)[0])
    np.save(tmp_path / "b.npy", rows(2)[1])
    feeds = [{"x": as_polygraphy(r)} for r in rows(4)[2:]]
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "c.json").write_text(json.dumps(feeds))
    (tmp_path / "labels.json").write_text("[1, 2]")
    (tmp_path / "notes.txt").write_text("not an input")
    found = load_samples([tmp_path, tmp_path / "saved"], SPECS)
    assert np.array_equal(np.stack([s.arrays["x"] for s in found]), rows(4))
    assert [Path(s.name).name for s in found] == ["a.npz", "b.npy", "c.json[0]", "c.json[1]"]


@pytest.mark.parametrize("along_batch", [False, True])
def test_stacked_arrays_are_taken_apart(tmp_path: Path, along_batch: bool) -> None:
    stacked = rows(3)[:, 0] if along_batch else rows(3)
    np.savez(tmp_path / "a.npz", x=stacked)
    found = load_samples([tmp_path / "a.npz"], SPECS, stacked=True)
    assert np.array_equal(np.stack([s.arrays["x"] for s in found]), rows(3))
    np.savez(tmp_path / "b.npz", x=rows(3), y=np.zeros((2, 2), np.int64))
    with pytest.raises(BadInputError, match="first axis"):
        load_samples([tmp_path / "b.npz"], TWO, stacked=True)


def test_a_loader_is_read_as_it_yields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_loader.py").write_text(
        "import numpy as np\n"
        "def data():\n    for i in range(3):\n        yield {'x': np.full((1, 4), i, np.float32)}\n"
        "def wrong():\n    yield {'x': np.zeros((1, 4), np.float32)}\n    raise KeyError('gone')\n"
        "def bare():\n    yield np.zeros((1, 4), np.float32)\n"
        "class Loader:\n    def __iter__(self):\n        return data()\n"
        "loader, batches, number = Loader(), list(data()), 7\n"
    )
    monkeypatch.chdir(tmp_path)
    names = ("my_loader:data", "my_loader.py:data", "my_loader:loader", "my_loader:batches")
    for text in names:
        found = load_samples([text], SPECS)
        assert [float(s.arrays["x"][0, 0]) for s in found] == [0.0, 1.0, 2.0]
    with pytest.raises(BadInputError, match="neither a function nor what gives samples"):
        load_samples(["my_loader:number"], SPECS)
    with pytest.raises(BadInputError, match="my_loader:wrong: KeyError"):
        load_samples(["my_loader:wrong"], SPECS)
    with pytest.raises(BadInputError, match=r"yield .'input': array."):
        load_samples(["my_loader:bare"], SPECS)
    with pytest.raises(BadInputError, match="no_such"):
        load_samples(["no_such:data"], SPECS)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "[{", "not readable JSON"),
        ("a.json", '{"x": 1}', "not a list of feed dictionaries"),
        ("a.json", '[{"x": [1, 2]}]', "no array as polygraphy saves it"),
        ("a.json", '[{"x": {"array": "!!"}}]', "no array as polygraphy saves it"),
        ("a.npy", "hello", "not a readable .npy file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=said):
        load_samples([tmp_path / name], SPECS)


def test_one_array_needs_a_model_of_one_input(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows(1)[0])
    with pytest.raises(BadInputError, match="the model takes x, y"):
        load_samples([tmp_path / "a.npy"], TWO)


def test_arrays_are_read_again_after_they_were_let_go() -> None:
    """Three of 40 MB each do not fit into what is kept."""
    asked = []

    def load(number: int) -> dict[str, np.ndarray]:
        asked.append(number)
        return {"x": np.full(10_000_000, number, np.float32)}

    recent = RecentArrays()
    lazy = [LazyArrays(lambda n=n: load(n), recent) for n in range(3)]  # type: ignore[misc]
    assert [float(a["x"][0]) for a in lazy] == [0.0, 1.0, 2.0]
    assert asked == [0, 1, 2] and len(lazy[2]) == 1 and asked == [0, 1, 2]
    assert float(lazy[0]["x"][0]) == 0.0 and asked == [0, 1, 2, 0]
    assert type(pickle.loads(pickle.dumps(LazyArrays(dict, recent)))) is dict


@pytest.mark.parametrize("content", ["zip", "npz", "deep"])
def test_json_that_polygraphy_did_not_save_is_refused(tmp_path: Path, content: str) -> None:
    data = io.BytesIO()
    np.savez(data, x=rows(1)[0])
    held = b"PK\x03\x04" + bytes(60) if content == "zip" else data.getvalue()
    text = json.dumps([{"x": {"array": base64.b64encode(held).decode()}}])
    path = tmp_path / "a.json"
    path.write_text("[" * 100_000 if content == "deep" else text)
    with pytest.raises(BadInputError, match=r"a\.json"):
        load_samples([path], SPECS)


def test_a_loader_that_yields_nothing_in_the_middle_has_not_ended() -> None:
    feeds = ({"x": rows(1)[0]}, None, {"x": rows(2)[1]})
    with pytest.raises(BadInputError, match=r"\[1\]: not a mapping but NoneType"):
        load_samples([lambda: iter(feeds)], SPECS)


@pytest.mark.parametrize("name", ["file", "allow_pickle", "args"])
def test_inputs_may_be_called_as_numpy_calls_its_own(name: str) -> None:
    specs = [InputSpec(name, np.dtype(np.float32), (1, 4))]
    found = load_samples([lambda: [{name: rows(1)[0]}]], specs)
    assert np.array_equal(found[0].arrays[name], rows(1)[0])


def test_scalars_may_be_stacked(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.float32([1.0, 2.0]))
    specs = [InputSpec("x", np.dtype(np.float32), ())]
    found = load_samples([tmp_path / "a.npz"], specs, stacked=True)
    assert [s.arrays["x"].shape for s in found] == [(), ()]
    assert [float(s.arrays["x"]) for s in found] == [1.0, 2.0]


def test_a_loader_may_lie_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my models+data (2)"
    folder.mkdir()
    (folder / "ld.py").write_text(
        "import numpy as np\ndef lst():\n    return [{'x': np.zeros((1, 4), np.float32)}]\n"
    )
    assert len(load_samples([f"{folder}/ld.py:lst"], SPECS)) == 1


def test_a_folder_that_looks_like_a_file_is_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(4, np.float32))
    (tmp_path / "b.npz").mkdir()
    assert find_files([tmp_path]) == [tmp_path / "a.npz"]
    with pytest.raises(BadInputError, match=r"b.npz: a folder; give"):
        find_files([str(tmp_path / "*.npz")])
    (tmp_path / "c.npz").symlink_to(tmp_path / "gone.npz")
    with pytest.raises(BadInputError, match=r"c.npz: a link to a file that is not there"):
        find_files([tmp_path])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("ending", [".npy", ".npz"])
def test_a_stack_is_taken_apart(tmp_path: Path, order: str, ending: str) -> None:
    stack = np.asarray(rows(50)[:, 0], order=order)  # type: ignore[call-overload]
    path = tmp_path / f"a{ending}"
    np.save(path, stack) if ending == ".npy" else np.savez_compressed(path, x=stack)
    found = load_samples([path], SPECS, stacked=True)
    assert len(found) == 50 and all(isinstance(s.arrays, LazyArrays) for s in found)
    assert all(np.array_equal(s.arrays["x"][0], row) for s, row in zip(found, stack, strict=True))


def test_a_file_that_changes_while_it_is_in_use_ends_the_run(tmp_path: Path) -> None:
    """What it held at first was the cache's key, and what it held then the answer."""
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros(4, np.float32))
    read = unchanged(path, lambda: np.load(path)["x"])
    assert not read().any() and not read().any()
    np.savez(path, x=np.ones(5, np.float32))
    with pytest.raises(BadInputError, match=r"x\.npz: changed while it was in use"):
        read()


@pytest.mark.parametrize("zipped", [False, True])
def test_a_header_of_gigabytes_is_not_read(tmp_path: Path, zipped: bool) -> None:
    """NumPy reads all of it before it says that it is too long."""
    header = b"\x93NUMPY\x02\x00" + (2_000_000_000).to_bytes(4, "little") + b"{'descr': '<f4'"
    path = tmp_path / ("x.npz" if zipped else "x.npy")
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header)
    else:
        path.write_bytes(header)
    with pytest.raises(BadInputError, match="its header is too long"):
        load_samples([path], SPECS)


@pytest.mark.parametrize("stacked", [False, True])
def test_an_array_without_a_name_is_the_only_input(tmp_path: Path, stacked: bool) -> None:
    np.savez(tmp_path / "a.npz", rows(1) if stacked else rows(1)[0])
    (found,) = load_samples([tmp_path / "a.npz"], SPECS, stacked=stacked)
    assert np.array_equal(found.arrays["x"], rows(1)[0])
    with pytest.raises(BadInputError, match=r"input 'x' is missing.*holds arr_0"):
        load_samples([tmp_path / "a.npz"], TWO)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 8, 10, 3), r"looks like NHWC, the model takes NCHW: array.transpose\(0, 3, 1, 2\)"),
        ((8, 10, 3), r"NHWC, .* NCHW: array\[None\].transpose\(0, 3, 1, 2\)"),
        ((3, 8, 10), r"add the batch axis: array\[None\]$"),
        ((1, 3, 10, 8), r"size 10 on axis 2, the model takes 8$"),
    ],
)
def test_another_layout_is_recognised(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        load_samples([{"pixels": np.zeros(shape, np.float32)}], IMAGES)


def test_channels_first_where_they_are_last_are_recognised() -> None:
    last = [InputSpec("pixels", np.dtype(np.float32), (1, 8, 10, 3))]
    given = {"pixels": np.zeros((1, 3, 8, 10), np.uint8)}
    words = r"uint8.*looks like NCHW, the model takes NHWC: array.transpose\(0, 2, 3, 1\)"
    with pytest.raises(BadInputError, match=words):
        load_samples([given], last)
