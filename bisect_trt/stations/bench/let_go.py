"""What only further plans need, given back before the documents are made."""

from __future__ import annotations

from bisect_trt.core.machine.memory import give_back
from bisect_trt.runners.ort.turns import Holder
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case


def let_go(case: Case, bench: Bench) -> None:
    """Close the sessions of the reference and the emulators: who asks for another plan finds them
    opened again.

    Args:
        case: whose reference.
        bench: whose emulators.
    """
    for holder in (case.reference, bench.emulator, bench.second.runner):
        if isinstance(holder, Holder):
            holder.release()
    give_back()
