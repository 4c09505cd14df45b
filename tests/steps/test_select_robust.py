"""How a validated search goes on after a refusal, where the truth about the layers is known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.search import prefix
from bisect_trt.search.minimise import Headroom
from bisect_trt.steps import select_robust
from bisect_trt.steps.search_set import Refusal
from bisect_trt.steps.select_fitted import Bisection
from bisect_trt.steps.select_robust import RobustSearch, shortest_passing


def searched(
    names: list[str],
    strength: dict[str, float],
    fewest: int = 0,
    search_set: Any = None,
) -> Bisection:
    """What the rounds end with, where the search set and the tests are made of numbers."""
    search_set = search_set or SimpleNamespace(
        base=PrecisionPlan("fp16"),
        add=lambda _: None,
        forget=lambda below: None,
        ask=lambda *_: SimpleNamespace(score=1.0),
    )
    found = search_of(names, strength, search_set, Costs({})).run(fewest)
    assert found is not None
    return found


class Costs:
    """A plan costs what its layers cost together."""

    def __init__(self, of: dict[str, float]) -> None:
        self._of, self.extra = of, sum(of.values())
        self.blocks = [
            [SimpleNamespace(name=name, is_matrix=name.startswith("matrix")) for name in of]
        ]

    def predicted(self, plan: PrecisionPlan) -> float:
        return sum(self._of.get(name, 0.0) for name in plan.pinned)


class Counted(Costs):
    """Counts the plans whose cost was asked for."""

    asked = 0

    def predicted(self, plan: PrecisionPlan) -> float:
        self.asked += 1
        return super().predicted(plan)


def search_of(
    names: list[str], strength: dict[str, float], search_set: Any, costs: Costs
) -> RobustSearch:
    problem: Any = SimpleNamespace(begin=(), settings=SimpleNamespace())
    context: Any = SimpleNamespace(
        tell=lambda _: None,
        evaluator=SimpleNamespace(workers=1),
        engine=None,
        time=SimpleNamespace(search_ended=lambda: None),
        tests=0,
        costs=costs,
    )
    return RobustSearch(problem, context, search_set, names, strength, Headroom(1.0, 0.0, 0.95))


@pytest.mark.parametrize(
    ("grow", "tested"), [(True, [62, 124]), (False, [62, 69, 76, 84, 93, 109])]
)
def test_a_refused_prefix_grows_to_what_should_pass(
    monkeypatch: pytest.MonkeyPatch, grow: bool, tested: list[int]
) -> None:
    """Layers whose effects fall off slowly and add up by squares: new copies pass from 120 pins on,
    of which the search set, that passes from 62 on, knows nothing. A tenth a round never gets
    there.
    """
    names = [f"layer{k}" for k in range(300)]
    strength = {name: 1.0 / (k + 10.0) ** 2 for k, name in enumerate(names)}
    left = np.cumsum(list(strength.values())[::-1])[::-1]
    asked = []

    def final_validation(_: Any, __: Any, plan: PrecisionPlan, *___: Any) -> tuple[Any, Any]:
        asked.append(len(plan.pinned))
        score = math.sqrt(left[len(plan.pinned)] / left[120])
        return (None, "validation") if score <= 1.0 else (Refusal("augmented", (), 9, score), None)

    monkeypatch.setattr(select_robust, "final_validation", final_validation)
    monkeypatch.setattr(select_robust, "shortest_passing", lambda *asked: max(62, asked[3]))
    if not grow:
        monkeypatch.setattr(prefix, "grown", lambda _, length, __: length)
    found = searched(names, strength)
    assert asked == tested
    assert (found.validation is not None) is grow


@pytest.mark.parametrize("fewest", [0, 20])
def test_a_set_of_fewer_pins_than_an_engine_refused_is_not_given(
    monkeypatch: pytest.MonkeyPatch, fewest: int
) -> None:
    """Of 24 pins, each of which can be tried, 10 would do on the search set."""
    names = [f"layer{k}" for k in range(40)]
    smaller = frozenset(names[:10])
    monkeypatch.setattr(select_robust, "shortest_passing", lambda *_: 24)
    monkeypatch.setattr(select_robust, "shrunk", lambda *_: dict.fromkeys(smaller))
    monkeypatch.setattr(select_robust, "final_validation", lambda *_: (None, "validation"))
    found = searched(names, {}, fewest)
    assert len(found.pinned) == (24 if fewest else 10)


@pytest.mark.parametrize(("length", "proved"), [(30, True), (30, False), (31, True)])
def test_only_what_can_be_proved_is_shrunk(
    monkeypatch: pytest.MonkeyPatch, length: int, proved: bool
) -> None:
    """Of so many pins 10 would do on the search set; of more than can be proved nobody asks
    that."""
    names = [f"layer{k}" for k in range(40)]
    proof = dict.fromkeys(names[:10]) if proved else None
    monkeypatch.setattr(select_robust, "shortest_passing", lambda *_: length)
    monkeypatch.setattr(select_robust, "shrunk", lambda *_: proof)
    monkeypatch.setattr(select_robust, "final_validation", lambda *_: (None, "validation"))
    found = searched(names, {})
    assert found.ranked is (len(found.pinned) == length)
    assert found.ranked is (length == 31 or not proved)


class SearchSet:
    """Passes what holds the first ``needed`` layers; the time ends after so many questions. A few
    samples pass what lacks ``unseen`` of them, and the second emulator asks for ``more`` of what it
    is told in ``strength``.
    """

    base = PrecisionPlan("fp16")

    def __init__(
        self, needed: int, asks: int, unseen: int = 0, more: int = 0, odd: int = 0
    ) -> None:
        self.needed, self.asks = [f"layer{k}" for k in range(needed)], asks
        self.unseen, self.more, self.odd = unseen, more, odd
        self.kept: list[frozenset[str]] = []
        self.asked: list[tuple[int, int | None]] = []
        self.asked_second: list[int] = []

    def ask(self, pins: frozenset[str], _: float, few: int | None = None) -> Any:
        self.asks -= 1
        if self.asks < 0:
            raise BudgetSpentError
        self.asked.append((len(pins), few))
        needed = self.needed[: len(self.needed) - self.unseen] if few else self.needed
        if self.odd:  # a draw that nothing passes
            return SimpleNamespace(verdict=Verdict.FAIL)
        return SimpleNamespace(verdict=Verdict.PASS if pins >= set(needed) else Verdict.FAIL)

    def ask_second(self, pins: frozenset[str], _: float) -> Any:
        self.asked_second.append(len(pins))
        needed = len(self.needed) + self.more
        verdict = Verdict.PASS if len(pins) >= needed else Verdict.FAIL
        return SimpleNamespace(verdict=verdict, score=1.1)

    @property
    def smallest(self) -> frozenset[str] | None:
        return min(self.kept, key=len, default=None)

    def keep(self, pins: frozenset[str]) -> None:
        self.kept.append(pins)

    def set_aside(self) -> bool:
        aside, self.odd = self.odd, 0
        return aside > 0

    def forget(self, below: int) -> None:
        self.kept = [pins for pins in self.kept if len(pins) >= below]


@pytest.mark.parametrize("unseen", [0, 3])
@pytest.mark.parametrize(("more", "second"), [(0, [40]), (10, [40, 44, 49, 54]), (999, None)])
def test_a_prefix_is_what_all_samples_and_both_emulators_pass(
    unseen: int, more: int, second: list[int] | None
) -> None:
    """Of 200 layers the first 40 are needed on the search set, 37 on the few samples that are
    asked."""
    search_set: Any = SearchSet(40, 1000, unseen, more)
    names = [f"layer{k}" for k in range(200)]
    # What the layers do is not known: each refusal adds a tenth.
    found = shortest_passing(search_set, names, Headroom(1.0, 0.0, 0.95), 0, [math.inf] * 200)
    assert found == (second[-1] if second else 200)
    assert search_set.asked_second[: len(second or [])] == (second or [])
    assert search_set.asked_second[-1] == found, "the last word is the second emulator's"
    assert (found, None) in search_set.asked and search_set.smallest == frozenset(names[:found])
    if more == 0:
        # The first that passes, the shortest, and those that the few wrongly passed.
        whole = [length for length, few in search_set.asked if few is None]
        assert [n for n in whole if n > 31] == ([63, 40] if not unseen else [63, 37, 38, 39, 40])


def test_all_samples_are_not_asked_about_all_pins_on_the_way() -> None:
    """Of 200 layers 150 are needed: galloping meets all of them first, which are an answer at any
    time; of 20,000 small layers their 41 samples take 4 s.
    """
    search_set: Any = SearchSet(150, 1000)
    names = [f"layer{k}" for k in range(200)]
    assert shortest_passing(search_set, names, Headroom(1.0, 0.0, 0.95), 0, [math.inf] * 200) == 150
    assert (200, 4) in search_set.asked and (200, None) not in search_set.asked
    assert search_set.kept == [frozenset(names[:150])]


def test_draws_that_nothing_passes_are_set_aside() -> None:
    search_set: Any = SearchSet(20, 1000, odd=1)
    names = [f"layer{k}" for k in range(200)]
    assert shortest_passing(search_set, names, Headroom(1.0, 0.0, 0.95), 0, [1.0] * 200) == 20
    assert search_set.odd == 0


def test_all_pins_that_miss_the_panel_are_no_prefix() -> None:
    search_set: Any = SearchSet(30, 1000)
    names = [f"layer{k}" for k in range(29)]
    assert shortest_passing(search_set, names, Headroom(1.0, 0.0, 0.95), 0, [1.0] * 29) is None


@pytest.mark.parametrize(
    ("asks", "pins"), [(6, 200), (7, 63), (13, 63), (14, 44), (15, 63), (16, 49)]
)
def test_what_the_second_emulator_refuses_is_not_all_that_passed(
    monkeypatch: pytest.MonkeyPatch, asks: int, pins: int
) -> None:
    """Of 200 layers 40 pass the first emulator, which saw that 63 pass too; the second asks for 45,
    and the time ends after so many questions.
    """
    names = [f"layer{k}" for k in range(200)]
    search_set = SearchSet(40, asks, more=5)
    found = cut_short(monkeypatch, search_set, names)
    assert len(found.pinned) == pins and found.validation is None and found.ranked


@pytest.mark.parametrize("asks", range(9, 19))
def test_what_shrinking_tried_is_no_answer_when_the_time_ends(
    monkeypatch: pytest.MonkeyPatch, asks: int
) -> None:
    """The prefix ends with the last of the layers that are needed, of which it holds others too."""
    names = [f"layer{k}" for k in (*range(10, 20), *range(10))]
    found = cut_short(monkeypatch, SearchSet(10, asks), names)
    assert found.pinned == frozenset(names) and found.ranked


ROOM = 40
"""Squared errors that a set may leave in :class:`Errors`."""


class Errors(SearchSet):
    """Passes what leaves at most :data:`ROOM` of the layers' squared errors."""

    def __init__(self, squares: dict[str, float]) -> None:
        super().__init__(0, 10_000)
        self.squares = squares

    def score(self, pins: frozenset[str]) -> float:
        left = sum(square for name, square in self.squares.items() if name not in pins)
        return math.sqrt(left / ROOM)

    def ask(self, pins: frozenset[str], limit: float, few: int | None = None) -> Any:
        score = self.score(pins) / limit
        return SimpleNamespace(verdict=Verdict.PASS if score <= 1.0 else Verdict.FAIL, score=score)

    def ask_second(self, pins: frozenset[str], limit: float) -> Any:
        return self.ask(pins, limit)

    def add(self, _: Refusal) -> None:
        pass


def network() -> tuple[dict[str, float], Costs]:
    """Ten matrix layers with the larger errors, and 90 cheap ones with small errors."""
    squares = {f"matrix{k}": 4.0 + 0.1 * k for k in range(10)}
    squares |= {f"cheap{k}": 0.6 for k in range(90)}
    cost = {name: 10.0 if name.startswith("matrix") else 0.001 for name in squares}
    return squares, Costs(cost)


def test_many_cheap_layers_are_taken_before_few_dear_ones() -> None:
    squares, costs = network()
    harm = sorted(squares, key=lambda name: -squares[name])
    search_set: Any = Errors(squares)
    search = search_of(harm, squares, search_set, costs)
    triage: Any = SimpleNamespace(
        base=PrecisionPlan("fp16"),
        ranking=harm,
        sensitivity=SimpleNamespace(strength=squares),
        broken=frozenset(),
    )
    few = search.shortest()
    chosen = select_robust.cheaper_search(search, costs, triage)  # type: ignore[arg-type]
    many = chosen.shortest()
    assert few is not None and many is not None and len(many) > len(few)
    assert search.cost(many) < 0.5 * search.cost(few)


def test_a_set_that_costs_nothing_is_not_looked_for_twice() -> None:
    squares, _ = network()
    search_set: Any = Errors(squares)
    free = Costs({"elsewhere": 1.0})
    search = search_of(list(squares), squares, search_set, free)
    triage: Any = SimpleNamespace(
        base=PrecisionPlan("fp16"),
        ranking=list(squares),
        sensitivity=SimpleNamespace(strength=squares),
        broken=frozenset(),
    )
    assert select_robust.cheaper_search(search, free, triage) is search  # type: ignore[arg-type]


class EndsWithRefusal(Errors):
    """The second emulator asks for one matrix layer; the time ends where it has refused a set."""

    ended = False

    def ask(self, pins: frozenset[str], limit: float, few: int | None = None) -> Any:
        if self.ended:
            raise BudgetSpentError
        return super().ask(pins, limit, few)

    def ask_second(self, pins: frozenset[str], limit: float) -> Any:
        self.ended = "matrix0" not in pins
        return SimpleNamespace(verdict=Verdict.FAIL if self.ended else Verdict.PASS, score=1.1)


def test_a_set_that_passed_is_not_lost_while_a_cheaper_one_is_looked_for() -> None:
    squares, costs = network()
    harm = sorted(squares, key=lambda name: -squares[name])
    search_set: Any = EndsWithRefusal(squares)
    search = search_of(harm, squares, search_set, costs)
    few = search.shortest()
    triage: Any = SimpleNamespace(
        base=PrecisionPlan("fp16"),
        ranking=harm,
        sensitivity=SimpleNamespace(strength=squares),
        broken=frozenset(),
    )
    with pytest.raises(BudgetSpentError):
        select_robust.cheaper_search(search, costs, triage)  # type: ignore[arg-type]
    assert few is not None and search_set.smallest == few


def test_what_held_layers_cost_does_not_rank_the_others() -> None:
    squares = {"matrix0": 4.0, "matrix1": 3.0}
    costs = Costs({"matrix0": 10.0, "matrix1": 1.0, "held": 1000.0})
    triage: Any = SimpleNamespace(
        base=PrecisionPlan("fp16", held=frozenset(["held"])),
        ranking=list(squares),
        sensitivity=SimpleNamespace(strength=squares),
        broken=frozenset(),
    )
    ranked = select_robust.ranked_by_worth(costs, triage)  # type: ignore[arg-type]
    assert ranked == ["matrix1", "matrix0"]


def test_what_a_refusal_has_overshot_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """New inputs pass from 30 layers on; after the refusal of 20 the next set has 90."""
    squares = dict.fromkeys((f"layer{k}" for k in range(100)), 0.5)
    search_set: Any = Errors(squares)
    tried = []

    def final_validation(_: Any, __: Any, plan: PrecisionPlan, *___: Any) -> tuple[Any, Any]:
        tried.append(len(plan.pinned))
        refused = Refusal("augmented", (), 9, 1.1) if tried[-1] < 30 else None
        return refused, None if refused else f"validation of {tried[-1]}"

    monkeypatch.setattr(select_robust, "final_validation", final_validation)
    monkeypatch.setattr(select_robust, "longer", lambda *_: 90)
    search = search_of(list(squares), squares, search_set, Costs(dict.fromkeys(squares, 1.0)))
    found = search.run()
    assert found is not None and found.validation == f"validation of {len(found.pinned)}"
    assert len(found.pinned) in tried and 30 <= len(found.pinned) < 90
    left = search_set.score(found.pinned)
    assert left > select_robust.OVERSHOT or 0.9 * len(found.pinned) <= tried[0]


def test_a_shorter_prefix_of_many_layers_asks_for_few_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dear layers come first, so that a prefix that costs a tenth less is much shorter."""
    names = [f"layer{k}" for k in range(20_000)]
    costs = Counted(dict.fromkeys(names[:2500], 1.0))
    tried = []

    def final_validation(_: Any, __: Any, plan: PrecisionPlan, *___: Any) -> tuple[Any, Any]:
        tried.append(len(plan.pinned))
        return (Refusal("augmented", (), 9, 1.1), None) if tried[-1] < 3000 else (None, "passed")

    monkeypatch.setattr(select_robust, "final_validation", final_validation)
    monkeypatch.setattr(select_robust, "longer", lambda *_: 18_000)
    search_set: Any = Errors(dict.fromkeys(names, 0.002))
    found = search_of(names, {}, search_set, costs).run()
    assert found is not None and len(found.pinned) == 18_000 and tried[1:] == [18_000, 2250]
    assert costs.asked < 40


def cut_short(
    monkeypatch: pytest.MonkeyPatch, search_set: SearchSet, names: list[str]
) -> Bisection:
    """What a search gives whose time ends on ``search_set``, or before a test on new copies."""

    def too_late(*_: Any) -> Any:
        raise BudgetSpentError

    monkeypatch.setattr(select_robust, "final_validation", too_late)
    return searched(names, {}, search_set=search_set)
