"""What ``--help`` says, and that it waits for no library."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "onnx", "onnxruntime", "pandas", "rich", "jinja2")


def test_help_imports_no_library_of_models() -> None:
    script = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from bisect_trt.cli import main\n"
        "for name in ('', *main.commands):\n"
        "    with suppress(SystemExit):\n"
        "        main([name, '--help'] if name else ['--help'])\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "[]\n", done.stderr
    assert done.stdout.count("Usage: ") == 14
