"""Image files as inputs: the pixels by hand, what is refused, and where the recipe is said."""

from __future__ import annotations

import json
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.inputs.images import ImageOptions, image_options
from bisect_trt.inputs.samples import load_inputs, load_samples
from bisect_trt.model.inputs import InputSpec
from bisect_trt.report.html import as_html
from bisect_trt.report.record import read_run
from bisect_trt.settings import Settings
from fixtures.models import conv_clip
from tests.command import call, saved
from tests.copies import FEWEST

RANDOM = np.random.default_rng(64)
RGB = RANDOM.integers(0, 256, (6, 8, 3), np.uint8)
"""6 pixels high, 8 wide."""

BILINEAR = Image.Resampling.BILINEAR


def spec(*shape: int | str, dtype: Any = np.float32) -> list[InputSpec]:
    return [InputSpec("x", np.dtype(dtype), shape)]


ANY_SIZE = spec("n", 3, "h", "w")


def options(**chosen: Any) -> ImageOptions:
    return image_options(Settings("m", [], **chosen))


def read(path: Path, specs: list[InputSpec] = ANY_SIZE, **chosen: Any) -> np.ndarray:
    (sample,) = load_samples([path], specs, images=options(**chosen))
    array = sample.arrays["x"]
    assert isinstance(array, np.ndarray) and array.dtype == specs[0].dtype
    return array


def write(path: Path, pixels: np.ndarray = RGB, **more: Any) -> Path:
    Image.fromarray(pixels).save(path, **more)
    return path


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    return write(tmp_path / "photo.png")


def nchw(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(2, 0, 1)[None]


def test_an_image_is_divided_by_255_and_channels_come_first(photo: Path) -> None:
    assert np.array_equal(read(photo), nchw(RGB) / np.float32(255.0))


def test_scale_mean_and_std_apply_to_each_channel(photo: Path) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    found = read(photo, mean="0.485,0.456,0.406", std=std)
    by_hand = (RGB / 255.0 - mean) / std
    np.testing.assert_allclose(found, nchw(by_hand), rtol=1e-6)
    found = read(photo, scale=1, mean="127.5", std="128")
    np.testing.assert_allclose(found, nchw((RGB - 127.5) / 128.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("specs", "layout", "last"),
    [
        (spec(1, 3, 6, 8), "auto", False),
        (spec("n", 6, 8, 3), "auto", True),
        (spec("n", "a", "b", "c"), "NHWC", True),
        (spec("n", "a", "b", "c"), "NCHW", False),
    ],
)
def test_the_layout_follows_the_shape_or_the_option(
    photo: Path, specs: list[InputSpec], layout: str, last: bool
) -> None:
    scaled = RGB / np.float32(255.0)
    assert np.array_equal(read(photo, specs, layout=layout), scaled[None] if last else nchw(scaled))


@pytest.mark.parametrize(
    ("specs", "asked", "size"),
    [
        (spec(1, 3, 4, 5), None, (5, 4)),
        (spec(1, 3, "h", "w"), "10x12", (10, 12)),
        (spec(1, 3, "h", "w"), "7", (7, 7)),
        (spec(1, 3, 12, "w"), None, (16, 12)),
        (spec(1, 3, "h", 4), None, (4, 3)),
        (spec(1, 3, 12, "w"), "20x12", (20, 12)),
        (spec(1, 3, "h", "w"), None, (8, 6)),
    ],
)
def test_the_size_follows_the_model_the_option_or_the_image(
    photo: Path, specs: list[InputSpec], asked: str | None, size: tuple[int, int]
) -> None:
    resized = np.asarray(Image.fromarray(RGB).resize(size, BILINEAR))
    found = read(photo, specs, image_size=asked)
    assert np.array_equal(found, nchw(resized) / np.float32(255.0))


def test_other_types_of_input(photo: Path) -> None:
    assert np.array_equal(read(photo, spec(1, 6, 8, 3, dtype=np.uint8)), RGB[None])
    half = read(photo, spec(1, 3, 6, 8, dtype=np.float16))
    assert np.array_equal(half, (nchw(RGB) / 255.0).astype(np.float16))
    grey = np.asarray(Image.fromarray(RGB).convert("L"))
    assert np.array_equal(read(photo, spec(1, 1, 6, 8, dtype=np.uint8)), grey[None, None])


RAW = spec(1, "h", "w", 3, dtype=np.uint8)
"""Takes pixels as they are."""


def test_grey_alpha_palette_and_cmyk_become_rgb(tmp_path: Path) -> None:
    grey = RGB[..., 0]
    assert np.array_equal(read(write(tmp_path / "g.png", grey), RAW)[0], np.dstack([grey] * 3))
    alpha = np.dstack([RGB, RANDOM.integers(0, 256, (6, 8), np.uint8)])
    assert np.array_equal(read(write(tmp_path / "a.png", alpha), RAW)[0], RGB)
    Image.fromarray(RGB).quantize(8).save(tmp_path / "p.png")
    palette = np.asarray(Image.fromarray(RGB).quantize(8).convert("RGB"))
    assert np.array_equal(read(tmp_path / "p.png", RAW)[0], palette)
    cmyk = Image.fromarray(RGB).convert("CMYK")
    cmyk.save(tmp_path / "c.tif")
    assert np.array_equal(read(tmp_path / "c.tif", RAW)[0], np.asarray(cmyk.convert("RGB")))


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_of_16_bits_the_high_byte_is_taken(tmp_path: Path, ending: str) -> None:
    deep = RANDOM.integers(0, 1 << 16, (6, 8), np.uint16)
    path = tmp_path / f"deep.{ending}"
    if ending == "pgm":  # Pillow 10 reads it and does not write it
        path.write_bytes(b"P5 8 6 65535\n" + deep.astype(">u2").tobytes())
    else:
        write(path, deep)
    found = read(path, spec(1, 1, 6, 8, dtype=np.uint8))
    assert np.array_equal(found[0, 0], (deep >> 8).astype(np.uint8))


@pytest.mark.parametrize(("orientation", "turns"), [(3, 2), (6, -1), (8, 1)])
def test_an_image_is_turned_as_exif_says(tmp_path: Path, orientation: int, turns: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = write(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(read(path, RAW)[0], np.rot90(RGB, turns))


def test_odd_metadata_are_no_message(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.jpg")
    path = write(tmp_path / "odd.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(path, RAW)
    assert np.array_equal(found, read(plain, RAW))


def test_a_phone_s_photograph_with_a_preview_is_its_first_frame(tmp_path: Path) -> None:
    flat = np.full((6, 8, 3), 200, np.uint8)
    preview = Image.fromarray(np.zeros((6, 8, 3), np.uint8))
    path = write(tmp_path / "phone.jpg", flat, format="MPO", save_all=True, append_images=[preview])
    with Image.open(path) as opened:
        assert opened.format == "MPO" and opened.n_frames == 2
    assert np.array_equal(read(path, RAW)[0], flat)


def _animated(folder: Path) -> Path:
    frames = [Image.fromarray(RGB[..., i]) for i in range(3)]
    frames[0].save(folder / "clip.gif", save_all=True, append_images=frames[1:])
    return folder / "clip.gif"


def _bytes(name: str, content: bytes) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return made


def _truncated(folder: Path) -> Path:
    noise = RANDOM.integers(0, 256, (64, 64, 3), np.uint8)
    path = write(folder / "half.png", noise)
    path.write_bytes(path.read_bytes()[:3000])
    return path


def _bomb(folder: Path) -> Path:
    """A file of few bytes whose header promises 3.6e9 pixels."""
    path = write(folder / "bomb.png")
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    content = path.read_bytes()
    path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_animated, "clip.gif: holds 3 frames, and one image is one sample; save each frame"),
        (_bytes("x.png", b"hello"), "x.png: not an image that Pillow reads; save it as PNG"),
        (_bytes("x.heic", b""), "x.heic: not an image that Pillow reads; save it as PNG"),
        (_truncated, "half.png: not a readable image"),
        (_bomb, "bomb.png: not a readable image"),
        (lambda f: write(f / "f.tif", np.zeros((2, 2), np.float32)), "its pixels are floats"),
        (lambda f: write(f / "i.tif", np.full((2, 2), 70_000, np.int32)), "more than 16 bits"),
    ],
)
def test_bad_images_are_one_line(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read(make(tmp_path))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "chosen", "said"),
    [
        (spec(1, 4, 6, 8), {}, "no axis of 1 or 3 channels; pass --layout"),
        (spec("n", "c", "h", "w"), {}, "of shape (n, c, h, w) has no axis of 1 or 3 channels"),
        (spec(1, 4, 6, 8), {"layout": "NCHW"}, "has 4 channels, and an image gives 1 or 3"),
        (spec(8, 3, 6, 8), {}, "takes a batch of 8, and an image is a batch of 1"),
        (spec(3, 6, 8), {}, "has 3 dimensions, and an image needs 4"),
        ([InputSpec("x", np.dtype(np.float32), None)], {}, "has an unknown shape"),
        (spec(1, 3, 6, 8, dtype=np.int64), {}, "takes int64, and an image gives floats or uint8"),
        (spec(1, 3, 6, 8, dtype=np.uint8), {"std": "0.5"}, "pixels as they are; leave out --std"),
        (
            spec(1, 3, 6, 8),
            {"image_size": "9x6"},
            "takes a width of 8, and --image-size asks for 9",
        ),
        (spec(1, 1, 6, 8), {"mean": ".1,.2,.3"}, "3 numbers, and input 'x' has 1 channel"),
        ([*ANY_SIZE, *spec(1)], {}, "one image, and the model takes x, x; save named arrays"),
    ],
)
def test_a_model_that_takes_no_such_image_is_named(
    photo: Path, specs: list[InputSpec], chosen: dict[str, str], said: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        read(photo, specs, **chosen)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"image_size": "big"}, "--image-size big: not a size; write WIDTHxHEIGHT"),
        ({"image_size": "0x9"}, "--image-size 0x9: not a size"),
        ({"mean": "a,b"}, "--mean a,b: not one or three numbers"),
        ({"mean": "1,2"}, "--mean 1,2: not one or three numbers"),
        ({"std": "nan"}, "--std nan: not one or three numbers"),
        ({"std": "0"}, "--std 0: each number must be more than 0"),
        ({"mean": "123.7,116.8,103.9"}, "for numbers of 0 to 255 pass --scale 1"),
    ],
)
def test_wrong_options_are_named(chosen: dict[str, str], said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        options(**chosen)
    assert said in str(caught.value)


def test_a_folder_is_read_in_order_and_arrays_come_before_images(tmp_path: Path) -> None:
    for number, name in enumerate(("b.PNG", "a.jpeg", "c.bmp")):
        write(tmp_path / name, np.full((6, 8, 3), 10 * number, np.uint8))
    (tmp_path / "labels.json").write_text("[1]")
    found = load_samples([tmp_path], RAW, stacked=True)
    assert [Path(s.name).name for s in found] == ["a.jpeg", "b.PNG", "c.bmp"]
    assert [int(s.arrays["x"].max()) for s in found] == [10, 0, 20]
    by_glob = load_samples([str(tmp_path / "*.[bP]*")], RAW)
    assert [s.digest for s in by_glob] == [s.digest for s in found[1:]]
    np.savez(tmp_path / "d.npz", x=RGB[None])
    assert [Path(s.name).name for s in load_samples([tmp_path], RAW)] == ["d.npz"]


def test_images_of_any_size_are_inputs_and_some_are_held_out(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"{number:02}.png", RANDOM.integers(0, 256, (6, 8 + number, 3), np.uint8))
    settings = Settings("m", [tmp_path], mean="0.5")
    given, holdout, findings = load_inputs(settings, ANY_SIZE, Observer())
    assert len(given) == 16 and len(holdout) == 4
    assert findings[0].message == (
        "20 images fed as RGB, each in its own size, pixel / 255 - [0.5], float32 NCHW: check "
        "that your application does the same"
    )


def test_options_without_an_image_are_refused() -> None:
    settings = Settings("m", [{"x": np.ones((1, 3, 2, 2), np.float32)}], mean="0.5")
    with pytest.raises(BadInputError, match="--mean: no input is an image"):
        load_inputs(settings, ANY_SIZE, Observer())


def test_pillow_is_asked_for_where_it_is_missing(
    photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadInputError, match=r"pip install 'bisect-trt\[images\]'"):
        read(photo)


RECIPE = "1 image fed as RGB, stretched to 48x48, (pixel / 255 - [0.5]) / [0.25], float32 NCHW"


def test_every_command_says_the_recipe(tmp_path: Path) -> None:
    model = saved(conv_clip(), tmp_path)[0]
    row = np.linspace(0, 255, 64)
    image = write(tmp_path / "x.png", np.dstack([np.add.outer(row, row) / 2] * 3).astype(np.uint8))
    given = ("--input", image, "--mean", "0.5", "--std", "0.25", "--requirement", "snr_db>=20")
    more = ("--runner", "emulated", "--out", tmp_path / "out")
    dry = call("run", model, *given, *more, "--dry-run")
    assert RECIPE in dry.output and dry.exit_code == 0
    made = call("run", model, *given, *more, "--repair", "none", limits=FEWEST)
    assert made.exit_code == 0 and made.output.count(RECIPE) == 1
    result = read_run(tmp_path / "out")
    assert [f.message.partition(":")[0] for f in result.findings if f.kind == "images"] == [RECIPE]
    page = as_html(result)
    first = page.index(RECIPE.partition(" (")[0])
    assert first < page.index('id="findings"')
    assert "--mean 0.5 --std 0.25" in page.partition("bisect-trt verify")[2]
    assert RECIPE.partition(" (")[0] in (tmp_path / "out/report.md").read_text()[:2000]
    plan = ("--plan", tmp_path / "out/plan.json", "--runner", "emulated", "--out", tmp_path / "v")
    verified = call("verify", model, *given, *plan, limits=FEWEST)
    assert verified.exit_code == 0 and RECIPE in verified.output
    assert RECIPE in json.dumps(json.loads((tmp_path / "v/verify.json").read_text()))
    compared = call("compare", model, *given, "--runner", "emulated", "--out", tmp_path / "c")
    assert compared.exit_code == 0 and RECIPE in compared.output
    out = ("--out", tmp_path / "r")
    repaired = call("repair", model, *given[:-2], "--verbose", *out)
    assert repaired.exit_code in (0, 1) and RECIPE in repaired.output
    fine = call("reduce", model, *given[:-2], "--check", "true", "--out", tmp_path / "s")
    assert fine.exit_code == 1 and RECIPE in fine.output


def test_a_project_file_takes_the_options(tmp_path: Path) -> None:
    saved(conv_clip(), tmp_path)
    write(tmp_path / "x.png", RANDOM.integers(0, 256, (48, 48, 3), np.uint8))
    table = "[models.m]\nmodel = 'm.onnx'\ninput = 'x.png'\nrequirement = 'snr_db>=20'\n"
    (tmp_path / "bisect.toml").write_text(f"{table}std = '0.25'\nscale = 0.003\n")
    asked = ("gate", "--config", tmp_path / "bisect.toml", "--runner", "emulated", "--robust", "0")
    assert call(*asked).exit_code == 0
    text = (tmp_path / "reports/gate/m/run.json").read_text()
    assert "pixel * 0.003 / [0.25], float32 NCHW" in text
    (tmp_path / "bisect.toml").write_text(f"{table}mean = 'dark'\n")
    wrong = call(*asked)
    assert wrong.exit_code == 2 and "[models.m]: --mean dark: not one or three" in wrong.output
