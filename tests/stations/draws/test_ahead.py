"""Of many nodes a test's draws are made before the reference gives way to the second emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bisect_trt.core.observer import Observer
from bisect_trt.runners.ort.reference import Reference
from bisect_trt.stations.bench.open_bench import open_bench
from bisect_trt.stations.draws.ahead import draw_ahead
from bisect_trt.stations.draws.fresh_test import next_test
from bisect_trt.stations.draws.holds import put_to_test
from tests.stations.draws.test_fresh_draws import MADE, case_of


@pytest.mark.parametrize(("many", "fitted"), [(True, False), (False, False), (True, True)])
def test_the_reference_is_not_opened_again_for_the_next_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool, fitted: bool
) -> None:
    if many:
        monkeypatch.setattr("bisect_trt.runners.ort.turns.MANY_NODES", 1)
    opened: list[int] = []
    plain = Reference._open

    def counted(self: Reference, *arguments: Any) -> Any:
        opened.append(1)
        return plain(self, *arguments)

    monkeypatch.setattr(Reference, "_open", counted)
    case = case_of(tmp_path, **({"robust": 0.0} if fitted else {}))
    MADE.clear()
    with open_bench(case, Observer()) as bench:
        bench.prober.probe(case.base)
        draw_ahead(case, bench)
        made = len(MADE)
        assert (made > 0) == (many and not fitted)
        bench.second.probe(case.base)
        if not made:
            return
        before = len(opened)
        draw_ahead(case, bench)  # as before the second emulator is asked about another set
        test = next_test(case, bench)
        assert made >= test.enough
        judges = [bench.prober, bench.second]
        refused, holds = put_to_test(case, bench, judges, case.base, test, 1.0)
        assert refused is None and holds is not None
        assert holds.redrawn.tested == holds.variants.tested == test.enough
    assert len(opened) == before, "all references were there"
