"""How many copies the validations of a test's runs are made on."""

from __future__ import annotations

from dataclasses import replace

from bisect_trt.base.limits import Limits

FEW = Limits(max_misses=0)
"""None may miss: fewer are made, and claim as much."""

FEWEST = Limits(misses_time_s=0.0, refused_time_s=0.0)
"""As many as are needed at least: enough where nothing is searched by them."""

EIGHT = replace(FEWEST, validation_time_s=0.0)
"""Eight, as of the slowest models: enough where cause, pins and files are what is looked at."""
