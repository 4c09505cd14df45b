"""Image files as inputs: the recipe that turns pixels into the model's input, and its options."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError, BisectError, MachineError, one_line
from bisect_trt.base.outcomes import Finding
from bisect_trt.inputs.npz import refuse_too_large
from bisect_trt.model.inputs import InputSpec
from bisect_trt.settings import Settings

if TYPE_CHECKING:
    from PIL import Image

IMAGE_ENDINGS = (
    ".png",
    ".jpg",
    ".jpeg",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".webp",
    ".ppm",
    ".pgm",
    ".avif",
    ".heic",
)
"""Endings of image files, in any case."""

IMAGES = "images"
"""Kind of finding: how image files became inputs."""

_SIZE = re.compile(r"(\d+)(?:x(\d+))?")
_PIXEL_SCALE = 1.0 / 255.0
_HIGH_BYTE = 8
"""Bits that a 16-bit pixel loses, as Pillow takes them from colour images."""

_BYTES_PER_VALUE = 16
"""Bytes that one channel of one pixel takes while it is converted."""

_CHANNELS = {1: "L", 3: "RGB"}
"""Pillow's mode by the number of channels."""


@dataclass(frozen=True)
class ImageOptions:
    """The options for images, parsed.

    ``width`` and ``height`` are pixels, None where not given. ``mean`` and ``std`` hold a value
    for all channels or one for each. ``given`` are the flags that were used.
    """

    width: int | None = None
    height: int | None = None
    scale: float = _PIXEL_SCALE
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str = "auto"
    given: tuple[str, ...] = ()


USUAL = ImageOptions()
"""What images become without options."""


@dataclass(frozen=True)
class Recipe:
    """How an image becomes the model's input ``name`` of type ``dtype``.

    ``width`` and ``height`` are pixels; None follows the image: in proportion where the other is
    set, else its own size.
    """

    name: str
    dtype: np.dtype[Any]
    channels: int
    last: bool  # whether channels are the last axis
    width: int | None
    height: int | None
    options: ImageOptions

    @property
    def sentence(self) -> str:
        """The recipe in words, without a full stop."""
        values = "pixels as they are" if self.dtype == np.uint8 else self._formula()
        mode = {1: "grey", 3: "RGB"}[self.channels]
        layout = "NHWC" if self.last else "NCHW"
        return f"{mode}, {self._size()}, {values}, {self.dtype} {layout}"

    def _size(self) -> str:
        if self.width is not None and self.height is not None:
            return f"stretched to {self.width}x{self.height}"
        if self.height is not None:
            return f"{self.height} pixels high in proportion"
        if self.width is not None:
            return f"{self.width} pixels wide in proportion"
        return "each in its own size"

    def _formula(self) -> str:
        options = self.options
        text = f"pixel * {options.scale:g}"
        if options.scale in (_PIXEL_SCALE, 1.0):
            text = "pixel / 255" if options.scale < 1.0 else "pixel"
        divided = set(options.std) != {1.0}
        if any(options.mean):
            text = f"{text} - [{_in_words(options.mean)}]"
            text = f"({text})" if divided else text
        return f"{text} / [{_in_words(options.std)}]" if divided else text


def is_image(name: str | Path) -> bool:
    """Whether the name of a file or of a sample ends as that of an image."""
    return Path(name).suffix.lower() in IMAGE_ENDINGS


def image_options(settings: Settings) -> ImageOptions:
    """The options for images, parsed.

    Raises:
        BadInputError: a value is wrong.
    """
    flags = {
        "--image-size": settings.image_size is not None,
        "--mean": settings.mean is not None,
        "--std": settings.std is not None,
        "--scale": settings.scale is not None,
        "--layout": settings.layout != "auto",
    }
    width, height = _size_of(settings.image_size)
    scale = _PIXEL_SCALE if settings.scale is None else settings.scale
    mean = _numbers("--mean", settings.mean, scale, 0.0)
    std = _numbers("--std", settings.std, scale, 1.0)
    if min(std) <= 0.0:
        raise BadInputError(f"--std {settings.std}: each number must be more than 0")
    given = tuple(flag for flag, used in flags.items() if used)
    return ImageOptions(width, height, scale, mean, std, settings.layout, given)


def _size_of(text: str | None) -> tuple[int | None, int | None]:
    """Width and height; one number is both."""
    if text is None:
        return None, None
    found = _SIZE.fullmatch(text.strip().lower())
    sizes = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if min(sizes) < 1:
        raise BadInputError(f"--image-size {text}: not a size; write WIDTHxHEIGHT, such as 640x480")
    return sizes


def _numbers(flag: str, text: str | None, scale: float, usual: float) -> tuple[float, ...]:
    """One number, or one for each of three channels."""
    if text is None:
        return (usual,)
    words = re.split(r"[,\s]+", text.strip("()[] "))
    try:
        numbers = tuple(float(word) for word in words)
    except ValueError:
        numbers = ()
    if len(numbers) not in _CHANNELS or not all(math.isfinite(n) for n in numbers):
        raise BadInputError(
            f"{flag} {text}: not one or three numbers; write such as 0.485,0.456,0.406"
        )
    # A pixel is at most 255: larger numbers belong to another scale.
    if max(map(abs, numbers)) > 256.0 * scale:
        raise BadInputError(
            f"{flag} {text}: more than any pixel, at most {255.0 * scale:g} after --scale; for "
            "numbers of 0 to 255 pass --scale 1"
        )
    return numbers


def recipe_for(path: Path, specs: Sequence[InputSpec], options: ImageOptions) -> Recipe:
    """The recipe for the image ``path``, from the model's input and the options.

    Raises:
        BadInputError: the model takes no image, or an option does not fit it.
    """
    if len(specs) != 1:
        names = ", ".join(spec.name for spec in specs)
        raise BadInputError(
            f"{path}: one image, and the model takes {names}; save named arrays with "
            "numpy.savez(path, name=array)"
        )
    spec = specs[0]
    shape = _image_shape(path, spec)
    what = f"{path}: input {spec.name!r} of shape {_shape_in_words(shape)}"
    last = _channels_last(what, shape, options.layout)
    channels = shape[3] if last else shape[1]
    channels = channels if isinstance(channels, int) else 3
    if channels not in _CHANNELS:
        raise BadInputError(
            f"{what} has {counted(channels, 'channel')}, and an image gives 1 or 3; feed an .npz "
            "file, or pass another --layout"
        )
    for flag, values in (("--mean", options.mean), ("--std", options.std)):
        if len(values) not in (1, channels):
            raise BadInputError(
                f"{flag} {_in_words(values)}: {len(values)} numbers, and input {spec.name!r} has "
                f"{counted(channels, 'channel')}"
            )
    height, width = shape[1:3] if last else shape[2:]
    return Recipe(
        spec.name,
        _value_type(path, spec, options),
        channels,
        last,
        _side(what, "width", width, options.width),
        _side(what, "height", height, options.height),
        options,
    )


def _image_shape(path: Path, spec: InputSpec) -> tuple[int | str | None, ...]:
    """The shape of an input that can be a batch of one image."""
    shape = spec.shape
    if shape is None or len(shape) != 4:
        rank = "an unknown shape" if shape is None else counted(len(shape), "dimension")
        raise BadInputError(
            f"{path}: input {spec.name!r} has {rank}, and an image needs 4; feed an .npz file"
        )
    if isinstance(shape[0], int) and shape[0] != 1:
        raise BadInputError(
            f"{path}: input {spec.name!r} takes a batch of {shape[0]}, and an image is a batch of "
            "1; export the model with a batch of 1, or feed an .npz file"
        )
    return shape


def _shape_in_words(shape: Sequence[int | str | None]) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"


def _channels_last(what: str, shape: Sequence[int | str | None], layout: str) -> bool:
    if layout != "auto":
        return layout == "NHWC"
    if shape[1] in _CHANNELS:
        return False
    if shape[3] in _CHANNELS:
        return True
    raise BadInputError(
        f"{what} has no axis of 1 or 3 channels; pass --layout NCHW or NHWC, or feed an .npz file"
    )


def _value_type(path: Path, spec: InputSpec, options: ImageOptions) -> np.dtype[Any]:
    """The input's type, if pixels can be given in it."""
    if spec.dtype == np.uint8:
        used = [flag for flag in ("--mean", "--std", "--scale") if flag in options.given]
        if used:
            raise BadInputError(
                f"{path}: input {spec.name!r} takes uint8, pixels as they are; leave out {used[0]}"
            )
    elif spec.dtype.kind != "f":
        raise BadInputError(
            f"{path}: input {spec.name!r} takes {spec.dtype}, and an image gives floats or uint8; "
            "feed an .npz file"
        )
    return spec.dtype


def _side(what: str, side: str, size: int | str | None, asked: int | None) -> int | None:
    """The width or height that the model or the user asks for; None for neither."""
    if not isinstance(size, int):
        return asked
    if asked is not None and asked != size:
        raise BadInputError(f"{what} takes a {side} of {size}, and --image-size asks for {asked}")
    return size


def read_image(path: Path, recipe: Recipe) -> dict[str, NDArray[Any]]:
    """The model's input by name: a batch of one image.

    The image is turned as EXIF says; alpha is dropped; of 16 bits the high byte is taken. It is
    resized in 8 bits by Pillow's bilinear filter, and then scaled.

    Raises:
        BadInputError: it cannot be read, holds several frames, or Pillow is not installed.
        MachineError: it does not fit into memory.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise BadInputError(
            f"{path}: Pillow, which reads images, is missing; pip install 'bisect-trt[images]'"
        ) from error
    try:
        # Pillow warns of odd metadata, which change no pixel, and of large images.
        with warnings.catch_warnings(action="ignore"), Image.open(path) as opened:
            frames = getattr(opened, "n_frames", 1)
            # A photograph of a phone (MPO) holds a preview as a second frame.
            if frames > 1 and opened.format != "MPO":
                raise BadInputError(
                    f"{path}: holds {frames} frames, and one image is one sample; save each frame "
                    "as a file"
                )
            refuse_too_large(f"{path}:", opened.width * opened.height * 3 * _BYTES_PER_VALUE)
            mode = _CHANNELS[recipe.channels]
            image = _in_8_bits(path, ImageOps.exif_transpose(opened)).convert(mode)
    except BisectError:
        raise
    except MemoryError as error:
        raise MachineError(f"{path}: does not fit into memory") from error
    except Exception as error:  # Pillow's parsers raise anything on damaged bytes
        raise BadInputError(f"{path}: {_why_unread(error)}") from error
    image = image.resize(_size_for(image, recipe), Image.Resampling.BILINEAR)
    pixels = np.asarray(image).reshape(image.height, image.width, recipe.channels)
    values = _values(pixels, recipe)[np.newaxis]
    layout = values if recipe.last else values.transpose(0, 3, 1, 2)
    return {recipe.name: np.ascontiguousarray(layout)}


def _why_unread(error: Exception) -> str:
    """What is wrong with a file that Pillow cannot read, and what to do."""
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    if "cannot identify" in str(error):
        return "not an image that Pillow reads; save it as PNG or JPEG"
    return f"not a readable image ({one_line(error)}); save it anew, or leave it out"


def _in_8_bits(path: Path, image: Image.Image) -> Image.Image:
    """``image`` with 8 bits a channel; other modes than grey ones have no more."""
    from PIL import Image

    if image.mode == "F":
        raise BadInputError(f"{path}: its pixels are floats; feed them as an .npz file")
    if not image.mode.startswith("I"):
        return image
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > np.iinfo(np.uint16).max:
        raise BadInputError(f"{path}: its pixels have more than 16 bits; feed an .npz file")
    return Image.fromarray((pixels >> _HIGH_BYTE).astype(np.uint8))


def _size_for(image: Image.Image, recipe: Recipe) -> tuple[int, int]:
    """The width and height that ``image`` is resized to."""
    width, height = recipe.width, recipe.height
    if width is None:
        ratio = 1.0 if height is None else height / image.height
        width = max(1, round(image.width * ratio))
    if height is None:
        ratio = 1.0 if recipe.width is None else recipe.width / image.width
        height = max(1, round(image.height * ratio))
    return width, height


def _values(pixels: NDArray[np.uint8], recipe: Recipe) -> NDArray[Any]:
    """The values of ``pixels``, whose last axis are channels."""
    if recipe.dtype == np.uint8:
        return pixels
    options = recipe.options
    scaled = pixels * options.scale  # in float64, so that the result is rounded once
    found: NDArray[Any] = ((scaled - options.mean) / options.std).astype(recipe.dtype)
    return found


def image_findings(
    names: Sequence[str], specs: Sequence[InputSpec], options: ImageOptions
) -> list[Finding]:
    """The recipe of the samples whose ``names`` are images', if there are some.

    Raises:
        BadInputError: options for images are given, and no sample is an image.
    """
    images = [name for name in names if is_image(name)]
    if not images:
        if options.given:
            raise BadInputError(
                f"{options.given[0]}: no input is an image; arrays are fed as they are, so leave "
                "it out"
            )
        return []
    recipe = recipe_for(Path(images[0]), specs, options)
    message = (
        f"{counted(len(images), 'image')} fed as {recipe.sentence}: check that your application "
        "does the same"
    )
    return [Finding(IMAGES, recipe.name, message)]


def _in_words(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
