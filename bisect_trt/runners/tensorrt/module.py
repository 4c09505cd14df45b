"""Finding TensorRT: ``tensorrt`` (10, 11; 8.6 for weak typing) or ``tensorrt_rtx``, which share one
Python API.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from bisect_trt.core.errors import BadInputError, RunnerUnavailableError

MODULES = ("tensorrt", "tensorrt_rtx")


def installed_module(choice: str | None = None) -> str | None:
    """The name of the module that would be used, None if none is installed. Nothing is imported.

    Raises:
        BadInputError: ``choice`` is no such module.
    """
    if choice is not None and choice not in MODULES:
        raise BadInputError(f"--trt-module {choice}: unknown; choose one of {', '.join(MODULES)}")
    wanted = (choice,) if choice else MODULES
    specs = {name: importlib.util.find_spec(name) for name in wanted}
    # A folder of type stubs shows as a namespace package: no file stands behind it.
    return next(
        (name for name, spec in specs.items() if spec is not None and spec.origin is not None), None
    )


def import_tensorrt(choice: str | None = None) -> Any:
    """The TensorRT module.

    Args:
        choice: ``tensorrt`` or ``tensorrt_rtx``; None takes whichever imports.

    Raises:
        RunnerUnavailableError: says what to install or what is broken.
    """
    name = installed_module(choice)
    if name is None:
        missing = choice or "tensorrt"
        package = "tensorrt-rtx-cu13" if choice == "tensorrt_rtx" else "tensorrt-cu13"
        raise RunnerUnavailableError(
            f"{missing} is not installed: pip install {package} cuda-python, or use --runner "
            "emulated"
        )
    try:
        module: ModuleType = importlib.import_module(name)
    except Exception as error:  # a missing library shows as ImportError, OSError or RuntimeError
        raise RunnerUnavailableError(
            f"{name} is installed and cannot be imported ({error}); reinstall it"
        ) from error
    if hasattr(
        module, "init_libnvinfer_plugins"
    ):  # without it no plugin is found, ROIAlign's for example
        module.init_libnvinfer_plugins(None, "")
    return module
