"""The search for a set of pins; pure: it knows the names of layers and a probe callable only."""

from bisect_trt.base.outcomes import Verdict
from bisect_trt.search.find import PinSearch, Probe, find_pins

__all__ = ["PinSearch", "Probe", "Verdict", "find_pins"]
