"""The version, in one place that the build can read without importing the package's
dependencies.
"""

from __future__ import annotations

__version__ = "0.5.0"
