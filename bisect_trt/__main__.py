"""The command ``bisect-trt``, also as ``python -m bisect_trt``."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130


def entry() -> None:
    """Run the command; Ctrl-C is answered in one line from the first import on."""
    try:
        from bisect_trt.cli import main

        main(prog_name="bisect-trt")
    except KeyboardInterrupt:
        sys.stderr.write("bisect-trt: interrupted\n")
        sys.stderr.flush()
        # Python itself would end by the signal where an extension's import was interrupted.
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    entry()
