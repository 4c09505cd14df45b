"""A fixed number of random networks, and every one that ever failed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.rounding import rounded
from bisect_trt.model.emulated import rounding_model
from tests.execute import run
from tests.fuzz.campaign import (
    Tally,
    campaign,
    plan_failures,
    recipe_for,
    search_failures,
    write_lines,
)
from tests.fuzz.graphs import Recipe, generate, recipe_of
from tests.fuzz.interpreter import to_type
from tests.fuzz.operators import BF16
from tests.fuzz.processes import RESTARTS, Options
from tests.fuzz.processes import run as run_processes
from tests.fuzz.relations import RELATIONS, Case, failures
from tests.fuzz.shrink import fewer_blocks, fewer_nodes

FOUND = Path(__file__).parent / "found" / "seeds.txt"
PLAN_SEEDS, PER_TEST = 120, 20
SEARCH_SEEDS = range(14)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def kept() -> list[tuple[str, str]]:
    """The recipes in found/seeds.txt, each with ``plan`` or ``search``."""
    rows = (line.partition("#")[0].split() for line in FOUND.read_text("utf-8").splitlines())
    return [(row[0], row[1]) for row in rows if row]


@pytest.mark.parametrize("first", range(0, PLAN_SEEDS, PER_TEST))
def test_relations_hold_of_random_networks(first: int) -> None:
    for number in range(first, first + PER_TEST):
        found = [f"{f.relation}: {f.detail}" for _, f in plan_failures(recipe_for(number))]
        assert found == [], recipe_for(number).text()


@pytest.mark.parametrize("number", SEARCH_SEEDS)
def test_searches_hold_and_name_what_was_planted(number: int) -> None:
    found = [f"{f.relation}: {f.detail}" for f in search_failures(recipe_for(number), Tally())]
    assert found == [], recipe_for(number).text()


@pytest.mark.parametrize(("text", "kind"), kept())
def test_what_failed_once_holds(text: str, kind: str) -> None:
    recipe = recipe_of(text)
    if kind == "search":
        found = search_failures(recipe, Tally())
    else:
        found = [failure for _, failure in plan_failures(recipe)]
    assert [f"{f.relation}: {f.detail}" for f in found] == []


def test_a_recipe_gives_the_same_network_each_time() -> None:
    recipe = Recipe(71, "overflow", None, frozenset({0}))
    assert recipe_of(recipe.text()) == recipe
    one, other = generate(recipe), generate(recipe)
    assert one.model.SerializeToString() == other.model.SerializeToString()
    assert one.planted == other.planted and one.planted[0].layers


def test_what_is_skipped_changes_no_other_block() -> None:
    whole = generate(Recipe(8, blocks=4)).model.graph
    less = generate(Recipe(8, blocks=4, skipped=frozenset({1}))).model.graph
    kinds = [n.op_type for n in whole.node if "/block1/" not in n.name]
    assert [n.op_type for n in less.node] == kinds


def rounding_values(precision: Precision) -> NDArray[np.float32]:
    """Every number of the format, every midpoint of two, and the neighbours of each midpoint."""
    dtype = np.dtype(np.float16) if precision is Precision.FP16 else BF16
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middle = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    ends = np.float32([65520, -65520, np.nextafter(np.float32(65520), np.float32(0)), np.inf])
    near = [np.nextafter(middle, np.float32(sign * np.inf)) for sign in (-1, 1)]
    return np.concatenate([numbers, middle, *near, ends])


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_the_product_rounds_as_the_interpreter_does(precision: Precision) -> None:
    values = rounding_values(precision)
    dtype = np.dtype(np.float16) if precision is Precision.FP16 else BF16
    expected = to_type(values, dtype).astype(np.float32)
    assert np.array_equal(rounded(values, precision), expected)
    emulated = run(rounding_model(precision), {"x": values})["y"]
    assert np.array_equal(emulated, expected)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_gfloat_rounds_alike(precision: Precision) -> None:
    """A third opinion: integers and powers of two, no hardware."""
    gfloat = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    is_fp16 = precision is Precision.FP16
    kind = formats.format_info_binary16 if is_fp16 else formats.format_info_bfloat16
    values = rounding_values(precision)
    expected = gfloat.round_ndarray(kind, values.astype(np.float64))
    assert np.array_equal(rounded(values, precision), expected.astype(np.float32))


def test_a_failure_shrinks_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """First to the one block with a softmax, then to the one node."""

    def has_softmax(case: Case) -> Iterator[str]:
        if any(node.op_type == "Softmax" for node in case.graph.proto.graph.node):
            yield "it has one"

    monkeypatch.setitem(RELATIONS, "no softmax", has_softmax)

    def fails(recipe: Recipe) -> bool:
        return any(failure.relation == "no softmax" for _, failure in plan_failures(recipe))

    recipe = next(r for r in map(Recipe, range(100, 200)) if fails(r) and generate(r).drawn > 3)
    ends = time.monotonic() + 60.0
    assert fewer_blocks(recipe, fails, time.monotonic()) == recipe
    least = fewer_blocks(recipe, fails, ends)
    assert len(least.skipped) == generate(recipe).drawn - 1
    (case, failure), *_ = plan_failures(least)
    case = fewer_nodes(case, lambda c: any(f.is_like(failure) for f in failures(c)), ends)
    assert [node.op_type for node in case.model.graph.node] == ["Softmax"]


def test_what_is_needed_stays() -> None:
    network = generate(Recipe(31, "overflow"))
    whole = Case(network.model, network.feeds, PrecisionPlan(Precision.FP16))
    needed = network.planted[0].layers
    least = fewer_nodes(whole, lambda _: True, time.monotonic() + 60.0, needed)
    assert {node.name for node in least.model.graph.node} == needed


def test_a_campaign_leaves_its_numbers(tmp_path: Path) -> None:
    """In two processes; the sum of two files is printed without a run."""
    command = [sys.executable, "-m", "tests.fuzz", "--out", str(tmp_path / "f.jsonl")]
    given = ["--minutes", "0.15", "--processes", "2", "--seed", "3", "--no-shrink"]
    ended = subprocess.run([*command, *given], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    file = tmp_path / "f.3.tally.json"
    one = Tally.of_json(file.read_text("utf-8"))
    assert one.graphs > 2 and one.lists["mixed same"]
    # A search that is set aside counts as neither.
    assert 0 < one.plans <= 2 * (one.graphs - one.searches)
    both = subprocess.run([*command, "--add", file, file], capture_output=True, text=True)
    assert both.returncode == 0
    assert both.stdout.startswith(f"{2 * one.graphs} graphs, {2 * one.plans} plans, ")


def test_a_tally_says_what_was_named() -> None:
    tally = Tally(named=Counter({"dead: harmless": 4, "offset: named": 3, "offset: missed": 1}))
    assert Tally.of_json(tally.as_json()) == tally
    assert list(tally.lines())[-1] == "75.00 % of 4 harmful faults are named"


@pytest.mark.parametrize("content", [None, "", "[1]", "{}", '{"graphs": 1}', "\xff"])
def test_what_is_no_tally_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "f.tally.json"
    if content is not None:
        file.write_text(content, "latin-1")
    command = [sys.executable, "-m", "tests.fuzz", "--add", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].startswith(f"python -m tests.fuzz: error: {file} is no")


def test_a_failure_has_its_line_before_it_is_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Case] = []

    def fails_and_then_crashes(case: Case) -> Iterator[str]:
        judged.append(case)
        if len(judged) > 2:  # both plans of the network
            raise SystemExit(3)
        yield "it fails"

    monkeypatch.setitem(RELATIONS, "holds twice", fails_and_then_crashes)
    out = tmp_path / "f.jsonl"
    with pytest.raises(SystemExit):
        campaign(1, 1, time.monotonic() + 60.0, out, lambda _: None, shrinks=True)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["relation"] for line in lines] == ["holds twice"] * 2


@pytest.mark.parametrize(("seed", "word"), [(9001080, "unjudged"), (9101404, "harmless")])
def test_a_chain_of_which_a_layer_misses_is_not_judged(seed: int, word: str) -> None:
    """It is harmless only where all layers together do no harm; neither is a search."""
    tally = Tally()
    assert search_failures(Recipe(seed, "chain"), tally) == []
    assert (tally.named, tally.searches) == ({f"chain: {word}": 1}, 0)


def test_a_line_that_was_cut_off_stays_one_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "f.jsonl"
    write_lines(out, [{"seed": 1}])
    with out.open("a") as file:
        file.write('{"see')
    write_lines(out, [{"seed": 2}, {"seed": 3}])
    write_lines(out, [])
    assert out.read_text().splitlines() == ['{"seed": 1}', '{"see', '{"seed": 2}', '{"seed": 3}']


def dies_at_its_third(first: int, options: Options, parent: Connection) -> None:
    """A process that says two networks are done; where 0 is the first, it then dies."""
    parent.send(Tally(graphs=1))
    parent.send(Tally(graphs=1))
    if first == 0:
        raise SystemExit(3)


def test_a_process_that_dies_is_a_failure(tmp_path: Path) -> None:
    """Its network has a line, and another process goes on behind it."""
    options = Options(2, time.monotonic() + 60.0, tmp_path / "f.jsonl", shrinks=False)
    tally = run_processes(0, options, dies_at_its_third)
    assert tally.graphs == 6
    assert tally.failures == {"a process ended with 3": 1}
    assert Tally.of_json(options.tally(0).read_text("utf-8")) == tally
    (line,) = options.out.read_text("utf-8").splitlines()
    assert json.loads(line)["seed"] == recipe_for(4).text()


def dies_at_once(first: int, options: Options, parent: Connection) -> None:
    """Of one lane the first three networks crash, and the fourth is done."""
    if first < 3:
        raise SystemExit(3)
    parent.send(Tally(graphs=1))


def test_networks_in_a_row_that_crash_do_not_end_a_lane(tmp_path: Path) -> None:
    options = Options(1, time.monotonic() + 60.0, tmp_path / "f.jsonl", shrinks=False)
    tally = run_processes(0, options, dies_at_once)
    assert (tally.graphs, tally.failures) == (1, {"a process ended with 3": 3})


def always_dies(first: int, options: Options, parent: Connection) -> None:
    """No network is ever done."""
    raise SystemExit(3)


@pytest.mark.slow
def test_a_lane_ends_where_no_process_does_anything(tmp_path: Path) -> None:
    options = Options(1, time.monotonic() + 600.0, tmp_path / "f.jsonl", shrinks=False)
    tally = run_processes(0, options, always_dies)
    assert tally.failures == {"a process ended with 3": RESTARTS + 1}


def hangs_at_first(first: int, options: Options, parent: Connection) -> None:
    """The first network never ends; the others are done at once."""
    if first == 0:
        time.sleep(600.0)
    parent.send(Tally(graphs=1))


@pytest.mark.slow
def test_a_network_that_hangs_is_a_failure(tmp_path: Path) -> None:
    options = Options(1, time.monotonic() + 600.0, tmp_path / "f.jsonl", False, longest_s=30.0)
    tally = run_processes(0, options, hangs_at_first)
    assert (tally.graphs, tally.failures) == (1, {"no end in 30 s": 1})
