"""Input files that break tools, for a model that takes FP32 x (4, 8)."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile.strange_models import X


def _npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _npy(array: Any, **more: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **more)
    return stream.getvalue()


def _header(text: str, data: bytes = b"") -> bytes:
    """An .npy file with a header of one's own."""
    padded = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + data


def _zip(method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


def _patched(data: bytes, marks: tuple[bytes, bytes], at: int, value: bytes) -> bytes:
    """``data`` with ``value`` ``at`` bytes behind each of zip's marks."""
    changed = bytearray(data)
    for mark, more in zip(marks, (0, 2), strict=True):
        start = changed.find(mark)
        changed[start + at + more : start + at + more + len(value)] = value
    return bytes(changed)


_ZIP_MARKS = (b"PK\x03\x04", b"PK\x01\x02")
_SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"

FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"1 2 3",
    "cut in half": lambda: _npz(x=X)[:200],
    "cut by a byte": lambda: _npz(x=X)[:-1],
    "flipped": lambda: _npz(x=X).replace(X.tobytes()[:8], b"\0" * 8),
    "no arrays": lambda: _npz(),
    "empty name": lambda: _zip(**{"": _npy(X)}),
    "another name": lambda: _npz(z=X),
    "one more": lambda: _npz(x=X, z=X),
    "single array": lambda: _npy(X),
    "objects": lambda: _zip(x=_npy(np.array([{"a": 1}], object), allow_pickle=True)),
    "text array": lambda: _npz(x=np.array(["a", "b"])),
    "double": lambda: _npz(x=X.astype(np.float64)),
    "big endian": lambda: _npz(x=X.astype(">f4")),
    "complex": lambda: _npz(x=X.astype(np.complex64)),
    "booleans": lambda: _npz(x=X > 0),
    "records": lambda: _npz(x=np.zeros((4, 8), [("a", "<f4")])),
    "dates": lambda: _npz(x=np.zeros((4, 8), "M8[s]")),
    "fewer": lambda: _npz(x=X[:3]),
    "one axis more": lambda: _npz(x=X[None]),
    "scalar": lambda: _npz(x=np.float32(1)),
    "no elements": lambda: _npz(x=np.zeros((0, 8), np.float32)),
    "NaN": lambda: _npz(x=np.full((4, 8), np.nan, np.float32)),
    "infinite": lambda: _npz(x=np.full((4, 8), np.inf, np.float32)),
    "largest": lambda: _npz(x=np.full((4, 8), 3.4e38, np.float32)),
    "subnormal": lambda: _npz(x=np.full((4, 8), 1e-45, np.float32)),
    "zeros": lambda: _npz(x=np.zeros((4, 8), np.float32)),
    "fortran order": lambda: _npz(x=np.asfortranarray(X)),
    "lies about its size": lambda: _zip(x=_header(_SHAPE % "(4, 8)", b"\0" * 7)),
    "promises more": lambda: _zip(x=_header(_SHAPE % "(99999999, 99999)", b"\0" * 128)),
    "promises too much": lambda: _zip(x=_header(_SHAPE % "(4, 8)", b"\0" * 999)),
    "negative size": lambda: _zip(x=_header(_SHAPE % "(-4, 8)", b"\0" * 128)),
    "shape is a name": lambda: _zip(x=_header(_SHAPE % "'x'", b"\0" * 128)),
    "header is code": lambda: _zip(x=_header("__import__('os').system('touch owned')")),
    "header is cut": lambda: _zip(x=_npy(X)[:20]),
    "header has no end": lambda: _zip(x=_header("{'descr': " + "(" * 5000)),
    "future version": lambda: _zip(x=_npy(X).replace(b"NUMPY\x01", b"NUMPY\x09")),
    "bomb": lambda: _zip(
        zipfile.ZIP_DEFLATED, x=_header(_SHAPE % "(50000000,)", b"\0" * 200_000_000)
    ),
    "encrypted": lambda: _patched(_npz(x=X), _ZIP_MARKS, 6, b"\x01\x00"),
    "unknown compression": lambda: _patched(_npz(x=X), _ZIP_MARKS, 8, b"\x63\x00"),
    "wrong checksum": lambda: _patched(_npz(x=X), _ZIP_MARKS, 14, b"\xff\xff\xff\xff"),
    "climbs out": lambda: _zip(**{"../../x": _npy(X)}),
}


def write(name: str, folder: Path) -> Path:
    """The file called ``name``."""
    path = folder / "x.npz"
    path.write_bytes(FILES[name]())
    return path
