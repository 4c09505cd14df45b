"""Many half-decided plans at once, each in both of the emulator's arithmetics: what a steered search walks with.

A history holds the live tensors after the layers decided so far. Looking at one runs the rest in FP32, where the order of sums does
not matter; so the rest is one optimised session from a point a few layers on, made anew as the walk goes on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bisect_trt.errors import RunnerFailedError, one_line
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulated import EmulatedRunner
from bisect_trt.runners.optimised import OptimisedRunner
from bisect_trt.runners.pieces import Piece, type_proto
from bisect_trt.runners.sessions import piece_session
from bisect_trt.runners.sites import Site, rounding_sites
from bisect_trt.runners.steps import Chain
from bisect_trt.search.steer import Look, Move

_STRIDE = 8
"""A look walks up to so many nodes to where the session of the rest begins: making one costs as much as tens of looks."""

_EXACT = PrecisionPlan(Precision.FP32)

Errors = Callable[[int, Mapping[str, NDArray[Any]]], tuple[NDArray[np.float32], float]]
"""From a sample's number and its outputs to the errors at the watched elements, in tolerances, and the worst of more elements."""


@dataclass(frozen=True)
class History:
    """``chains``: live tensors, an arithmetic at a time and a sample at a time, before the step at ``position``."""

    position: int
    chains: tuple[tuple[Chain, ...], ...]


@dataclass(frozen=True)
class _Rest:
    """The network from the step at ``position`` on, in FP32."""

    position: int
    piece: Piece


class Histories:
    """Runs ``layers`` of ``model`` on ``samples``, lowered to ``precision`` or exact.

    ``errors`` judges a sample's outputs; ``threads`` is for the first arithmetic, whose sums may follow their number.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        samples: Sequence[Sample],
        precision: Precision,
        layers: Sequence[str],
        errors: Errors,
        threads: int = 1,
    ) -> None:
        self._samples = list(samples)
        self._runners: tuple[EmulatedRunner, ...] = (
            EmulatedRunner(model, samples, precision, threads=threads),
            OptimisedRunner(model, samples, precision, threads=1),
        )
        self._plan = PrecisionPlan(precision)
        self._layers = frozenset(layers)
        self._errors = errors
        self._outputs = [o.name for o in model.graph.output]
        self._rest: _Rest | None = None
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def __enter__(self) -> Histories:
        # Constants and sessions are made on first use, which threads must not do at a time.
        for runner in self._runners:
            for plan in (self._plan, _EXACT):
                runner.advance(runner.steps, plan, runner.start(self._samples[0]))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def arithmetics(self) -> int:
        """How many rows a look has."""
        return len(self._runners)

    @cached_property
    def start(self) -> History:
        """Before the first layer."""
        chains = [[runner.start(sample) for sample in self._samples] for runner in self._runners]
        position = self._pass_by(0, [(r, c) for r, own in zip(self._runners, chains, strict=True) for c in own])
        return History(position, tuple(map(tuple, chains)))

    def follow(self, moves: Sequence[Move[History]]) -> list[tuple[History, Look | None]]:
        """Make ``moves``, all on the same layer."""
        if any(move.look for move in moves):
            self._place_rest(moves[0].state.position + 1, lambda begin: self._exact_chain(moves[0].state, begin))
        jobs = [(move, number) for move in moves for number in range(len(self._runners))]
        done = list(self._pool.map(lambda job: self._move(*job), jobs))
        made = []
        for first, move in zip(range(0, len(done), len(self._runners)), moves, strict=True):
            parts = done[first : first + len(self._runners)]
            seen = [look for _, _, look in parts if look is not None]
            look = None
            if move.look and len(seen) == len(parts):
                look = Look(np.vstack([s.errors for s in seen]), max(s.score for s in seen))
            made.append((History(parts[0][0], tuple(chains for _, chains, _ in parts)), look))
        return made

    def single_roundings(self, draws: Sequence[Sequence[Sample]]) -> dict[Site, list[NDArray[np.float64] | None]]:
        """Every rounding the layers can make, and the errors when it alone is made, less those of none; None if not finite.

        Once for each of ``draws`` of the samples; those of constants for the first draw only.
        """
        runner = self._runners[0]
        chains = [[runner.start(sample) for sample in samples] for samples in draws]
        exact = [self._look(runner, 0, own) for own in chains]
        by_step: dict[int, list[Site]] = {}
        for site in rounding_sites(runner.steps, runner.constants, self._outputs, self._plan.base):
            by_step.setdefault(site.position, []).append(site)
        found: dict[Site, list[NDArray[np.float64] | None]] = {}
        for position, step in enumerate(runner.steps):
            own = by_step.get(position, [])
            if own:
                state = History(position, (tuple(chains[0]),))
                self._place_rest(position + 1, lambda begin, state=state: self._exact_chain(state, begin))  # type: ignore[misc]
            jobs = [(site, draw) for site in own for draw in range(1 if site.constant else len(draws))]
            looks = self._pool.map(lambda job: self._disturbed(runner, job[0], chains[job[1]]), jobs)
            for (site, draw), look in zip(jobs, looks, strict=True):
                plain = exact[draw]
                row = None if look is None or plain is None else look.errors[0] - plain.errors[0]
                found.setdefault(site, []).append(row)
            for chain in (chain for own_chains in chains for chain in own_chains):
                runner.advance([step], _EXACT, chain)
        self._rest = None
        return found

    def _disturbed(self, runner: EmulatedRunner, site: Site, chains: Sequence[Chain]) -> Look | None:
        """A look at the network with one rounding made."""
        forks = [chain.fork() for chain in chains]
        step = runner.steps[site.position]
        for fork in forks:
            if site.read:
                before = fork.values.get(site.tensor)
                source = runner.constants.value(site.tensor) if site.constant else fork.values[site.tensor]
                fork.values[site.tensor] = runner.round(source, self._plan.base)
                runner.advance([step], _EXACT, fork)
                rounded = fork.values.pop(site.tensor, None)
                if before is not None and rounded is not None:  # others read it still, as it was
                    fork.values[site.tensor] = before
            else:
                runner.advance([step], _EXACT, fork)
                if site.tensor in fork.values:
                    fork.values[site.tensor] = runner.round(fork.values[site.tensor], self._plan.base)
        return self._look(runner, site.position + 1, forks)

    def _move(self, move: Move[History], number: int) -> tuple[int, tuple[Chain, ...], Look | None]:
        runner, position = self._runners[number], move.state.position
        chains = tuple(chain.fork() for chain in move.state.chains[number])
        following = position + 1
        try:
            for chain in chains:
                runner.advance([runner.steps[position]], self._plan if move.lowered else _EXACT, chain)
                following = self._pass_by(position + 1, [(runner, chain)])
        except RunnerFailedError:
            if not move.look:  # nobody would notice
                raise
            return following, chains, None
        return following, chains, self._look(runner, following, chains) if move.look else None

    def _look(self, runner: EmulatedRunner, position: int, chains: Sequence[Chain]) -> Look | None:
        """The outputs' errors when the steps from ``position`` on are exact; None if there are outputs that are not finite."""
        try:
            seen = [self._errors(number, self._finish(runner, position, chain)) for number, chain in enumerate(chains)]
        except RunnerFailedError:
            return None
        errors, score = np.concatenate([vector for vector, _ in seen]).astype(np.float64), max(worst for _, worst in seen)
        return Look(errors[None], score) if math.isfinite(score) and np.isfinite(errors).all() else None

    def _pass_by(self, position: int, histories: Sequence[tuple[EmulatedRunner, Chain]]) -> int:
        """Run the steps that are no layers, up to the next layer's."""
        steps, end = self._runners[0].steps, position
        while end < len(steps) and not (steps[end].name in self._layers and steps[end].lowers(self._plan.base)):
            end += 1
        for runner, chain in histories:
            runner.advance(runner.steps[position:end], _EXACT, chain)
        return end

    def _finish(self, runner: EmulatedRunner, position: int, chain: Chain) -> dict[str, NDArray[Any]]:
        """The outputs when the steps from ``position`` on are exact."""
        rest = self._rest
        end = len(runner.steps) if rest is None else rest.position
        fork = chain.fork()
        runner.advance(runner.steps[position:end], _EXACT, fork)
        if rest is None:
            return {name: runner.fetch(name, fork) for name in self._outputs}
        piece = rest.piece
        results = piece.run({name: fork.values[name] for name in piece.inputs}, piece.outputs, None)
        found = {name: results[i].numpy() for i, name in enumerate(piece.outputs)}
        return {name: found[name] if name in found else runner.fetch(name, fork) for name in self._outputs}

    def _place_rest(self, position: int, exact: Callable[[int], Chain]) -> None:
        """Have the session of the rest begin a little after the first layer from ``position`` on.

        ``exact`` gives live tensors before a step, for their types.
        """
        first = self._pass_by(position, ())
        if self._rest is not None and self._rest.position >= first:
            return
        begin = first + _STRIDE
        self._rest = _Rest(begin, self._session(begin, exact(begin))) if begin < len(self._runners[0].steps) else None

    def _exact_chain(self, state: History, end: int) -> Chain:
        runner, chain = self._runners[0], state.chains[0][0].fork()
        runner.advance(runner.steps[state.position : end], _EXACT, chain)
        return chain

    def _session(self, begin: int, chain: Chain) -> Piece:
        runner = self._runners[0]
        steps, constants = runner.steps[begin:], runner.constants
        made = {name for step in steps for name in step.outputs}
        read = dict.fromkeys(name for step in steps for name in step.inputs if name not in made)
        inputs = [helper.make_value_info(n, type_proto(chain.values[n].data_type())) for n in read if n not in constants]
        stored = [numpy_helper.from_array(constants.value(n).numpy(), n) for n in read if n in constants]
        outputs = [onnx.ValueInfoProto(name=n) for n in self._outputs if n in made]
        graph = helper.make_graph([runner.model.graph.node[s.index] for s in steps], "rest", inputs, outputs, stored)
        model = onnx.ModelProto(ir_version=max(runner.model.ir_version, 4), graph=graph)
        model.opset_import.extend(runner.model.opset_import)
        model.functions.extend(runner.model.functions)
        try:
            session = piece_session(model.SerializeToString(), 1, optimised=True)
        except Exception as error:  # too large to serialise, or something ONNX Runtime takes only as a whole
            raise RunnerFailedError(f"ONNX Runtime cannot load the network from step {begin} on ({one_line(error)})") from error
        return Piece(session, tuple(i.name for i in inputs), tuple(o.name for o in outputs))
