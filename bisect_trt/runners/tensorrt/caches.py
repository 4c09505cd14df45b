"""Where an engine's timings and kernels are kept for the next one."""

from __future__ import annotations

from pathlib import Path

from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineRequest


def cache_file(
    folder: Path | None, module: str, version: str, request: EngineRequest, kind: str
) -> Path | None:
    """A file for each configuration: timing caches depend on the flags. None for an engine that is
    built otherwise than usual.

    Args:
        folder: of all of them; None where nothing is kept.
        module: ``tensorrt`` or ``tensorrt_rtx``.
        version: of the module.
        request: what is built.
        kind: ``timing`` or ``kernels``.
    """
    if folder is None or request.options != AS_USUAL:
        return None
    typing = request.weak.base if request.weak else "strong"
    flags = f"{'tf32' if request.tf32 else 'strict'}-{typing}"
    return folder / f"{module}-{version}-{flags}.{kind}"
