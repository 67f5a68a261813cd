"""Random schedules: no page leaks, none is shared wrongly, and every sample finishes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.engine.native.scheduler import Scheduler
from burnish.engine.native.sequence import RequestGroup, Sequence
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.types import Completion, Finish


@dataclass
class Simulation:
    """An engine whose cache holds, in each slot, which tokens under which weights were written."""

    scheduler: Scheduler
    version: int = 0
    groups: list[RequestGroup] = field(default_factory=list)
    lengths: dict[Sequence, int] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)
    """Samples that have ended and were not continued."""
    slots: dict[tuple[int, int], tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def submit(self, prompt: int, n: int, length: int, common: int = 0) -> None:
        """Beyond the first `common` tokens no two groups share a value, so that a mix-up shows."""
        name = len(self.groups)
        ids = np.arange(prompt) + np.where(np.arange(prompt) < common, 0, 1000 * (name + 1))
        group = RequestGroup(Request(str(name), ids, n, group=name, continues=True))
        self.groups.append(group)
        self.lengths |= dict.fromkeys(group.sequences, prompt + length)
        self.scheduler.add(group)

    def continue_one(self, which: int, more: int, length: int) -> None:
        """Submit the next turn of a sample that has ended, after ``more`` inserted tokens."""
        if not self.ended:
            return
        old = self.ended.pop(which % len(self.ended))
        request = old.group.request
        response = np.array([*old.response, *range(-more, 0)], np.int32)
        begun = Completion(
            "", 0, response, np.zeros(len(response), np.float32), response, response > 0,
            request.params, Finish.STOP, None, "",
        )  # fmt: skip
        turn = Request(
            f"{request.request_id}+", request.prompt, group=request.group, begun=begun,
            first=request.first + old.index, continues=True,
        )  # fmt: skip
        group = RequestGroup(turn)
        self.groups.append(group)
        self.lengths[group.sequences[0]] = len(turn.given) + length
        self.scheduler.add(group)

    def step(self) -> None:
        plan = self.scheduler.plan()
        size = self.scheduler.pages.size
        assert sum(plan.counts.values()) <= self.scheduler.settings.step_tokens
        assert len(self.scheduler.running) <= self.scheduler.settings.max_running
        copied = {}
        for source, target in plan.copies.values():
            copied |= {(target, i): self.slots.get((source, i)) for i in range(size)}
        self.slots |= {slot: content for slot, content in copied.items() if content}
        writers: Counter[tuple[int, int]] = Counter()
        for sequence, count in plan.counts.items():
            for position in range(sequence.computed, sequence.computed + count):
                slot = (sequence.pages[position // size], position % size)
                assert self.scheduler.pages.holders[slot[0]] == 1, "writes go to one's own pages"
                writers[slot] += 1
                tokens = tuple(sequence.tokens[: position + 1])
                self.slots[slot] = (tokens, self.version)
        assert set(writers.values()) <= {1}
        for sequence, count in plan.counts.items():
            self._read(sequence, sequence.computed + count)
        for sequence in self.scheduler.advance(plan):
            sequence.tokens.append(10**6 * (sequence.index + 1) + len(sequence.tokens))
            sequence.logprobs.append(0.0)
            if len(sequence.tokens) >= self.lengths[sequence]:
                sequence.finish = Finish.STOP
                self.finish(sequence)
                self.ended.append(sequence)
        self.check()

    def update(self) -> None:
        self.version += 1
        self.scheduler.update()

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        sequence.group.sequences.remove(sequence)

    def abort(self, which: int) -> None:
        live = [s for group in self.groups for s in group.sequences]
        if live:
            self.finish(live[which % len(live)])

    def _read(self, sequence: Sequence, end: int) -> None:
        size = self.scheduler.pages.size
        for position in range(end):
            page = sequence.pages[position // size]
            tokens, version = self.slots[page, position % size]
            assert tokens == tuple(sequence.tokens[: position + 1])
            assert self.scheduler.settings.on_update == "keep" or version == self.version

    def check(self) -> None:
        """The holders of each page, counted afresh."""
        held: Counter[int] = Counter()
        for group in self.groups:
            for sequence in group.sequences:
                held.update(sequence.pages)
                assert sequence.waits == (sequence in self.scheduler.waiting)
                assert not (sequence.waits and sequence.pages) or sequence.prefix
        pages = self.scheduler.pages
        assert all(pages.holders[page] == held[page] for page in range(pages.count))
        assert pages.free == pages.count - len(held)


def simulated(pages: int = 100, *, prompts_first: bool = False, **settings: Any) -> Simulation:
    given = {"page_size": 4, "max_running": 8, "on_update": "keep"} | settings
    return Simulation(Scheduler(EngineSettings(**given), pages, prompts_first=prompts_first))


EVENTS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(1, 20),
        st.integers(1, 5),
        st.integers(1, 12),
        st.integers(0, 20),
    ),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("continue"), st.integers(0, 30), st.integers(0, 5), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("update")),
)


@settings(max_examples=300, deadline=None)
@given(
    events=st.lists(EVENTS, max_size=25),
    pages=st.integers(8, 30),
    running=st.integers(1, 8),
    budget=st.integers(1, 24),
    keep=st.booleans(),
    prompts_first=st.booleans(),
)
def test_random_schedules(
    events: list[tuple[str, *tuple[int, ...]]],
    pages: int,
    running: int,
    budget: int,
    keep: bool,
    prompts_first: bool,
) -> None:
    on_update = "keep" if keep else "recompute"
    given = {"max_running": running, "step_tokens": budget, "on_update": on_update}
    simulation = simulated(pages, prompts_first=prompts_first, **given)
    scheduler = simulation.scheduler
    for name, *numbers in events:
        match name:
            case "submit":
                simulation.submit(*numbers)
            case "step":
                for _ in range(numbers[0]):
                    simulation.step()
            case "continue":
                if all(len(s.tokens) + 17 < 4 * pages for s in simulation.ended):
                    simulation.continue_one(*numbers)
            case "abort":
                simulation.abort(*numbers)
            case "update":
                simulation.update()
        simulation.check()
    for _ in range(20_000):
        if not (scheduler.waiting or scheduler.running):
            break
        simulation.step()
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.pages.free == pages


def test_planning_needs_no_torch() -> None:
    code = "import sys, burnish.engine.native.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def decoding(samples: int, **settings: int) -> Simulation:
    """So many samples that have one token to run."""
    simulation = simulated(**{"step_tokens": 4} | settings)
    for _ in range(samples):
        simulation.submit(prompt=1, n=1, length=20)
    simulation.step()
    return simulation


def test_a_plan_that_only_decodes() -> None:
    scheduler = decoding(3).scheduler
    assert scheduler.only_decodes(scheduler.plan())


@pytest.mark.parametrize("prompts_first", [False, True])
def test_samples_that_decode_wait_for_prompts_if_that_is_faster(prompts_first: bool) -> None:
    simulation = simulated(step_tokens=8, prompts_first=prompts_first)
    simulation.submit(prompt=3, n=1, length=20)
    simulation.step()
    (early,) = simulation.scheduler.running
    simulation.submit(prompt=12, n=1, length=20)
    plan = simulation.scheduler.plan()
    late = next(sequence for sequence in plan.counts if sequence is not early)
    assert (early in plan.counts) != prompts_first
    assert plan.counts[late] == (8 if prompts_first else 7)


def test_one_token_of_an_unfinished_prompt_is_no_decoding() -> None:
    simulation = decoding(3)
    simulation.submit(prompt=9, n=1, length=2)
    plan = simulation.scheduler.plan()
    (sample,) = simulation.groups[3].sequences
    assert (plan.counts[sample], sample.pending) == (1, 9)
    assert not simulation.scheduler.only_decodes(plan)


def test_who_waits_for_tokens_of_a_step_may_begin_and_who_waits_for_a_place_may_not() -> None:
    for room, expected in ((8, False), (4, True)):
        simulation = decoding(4, max_running=room)
        simulation.submit(prompt=9, n=1, length=2)
        plan = simulation.scheduler.plan()
        assert len(simulation.scheduler.waiting) == 1
        assert simulation.scheduler.only_decodes(plan) == expected


def test_a_group_is_computed_once_and_its_pages_are_shared() -> None:
    simulation = simulated(step_tokens=64)
    simulation.submit(prompt=18, n=4, length=6)
    simulation.step()
    simulation.step()
    whole = [tuple(s.pages[:4]) for s in simulation.groups[0].sequences]
    assert len(set(whole)) == 1
    assert simulation.scheduler.pages.holders[whole[0][0]] == 4
    last = [s.pages[4] for s in simulation.groups[0].sequences]
    assert len(set(last)) == 4


def test_prompts_that_begin_the_same_share_the_pages_of_that() -> None:
    simulation = simulated(step_tokens=64)
    for _ in range(3):
        simulation.submit(prompt=18, n=1, length=6, common=10)
    simulation.step()
    first, *others = (group.sequences[0] for group in simulation.groups)
    assert (first.computed, [s.computed for s in others]) == (18, [0, 0])  # they wait for it
    simulation.step()
    assert [s.computed for s in others] == [18, 18]
    assert all(s.pages[:2] == first.pages[:2] for s in others)
    assert len({s.pages[2] for s in (first, *others)}) == 3
    assert [simulation.scheduler.pages.holders[page] for page in first.pages[:3]] == [3, 3, 1]


def test_a_turn_finds_the_pages_of_the_last_one() -> None:
    """Also if other samples were computed in between, but not beyond the cache, and not under new
    weights."""
    cases = ((0, False, 26), (8, False, 26), (80, False, 0), (0, True, 0))
    for between, updates, expected in cases:
        simulation = simulated(pages=20, step_tokens=64)
        simulation.submit(prompt=18, n=1, length=9)  # of 27 tokens, the last was not computed
        for _ in range(12):
            simulation.step()
        assert simulation.scheduler.pages.free == 20
        for _ in range(between // 8):
            simulation.submit(prompt=12, n=1, length=2)
            for _ in range(4):
                simulation.step()
        if updates:
            simulation.update()
        before = len(simulation.groups)
        (place,) = (i for i, s in enumerate(simulation.ended) if s.group is simulation.groups[0])
        simulation.continue_one(place, more=3, length=4)
        plan = simulation.scheduler.plan()
        (turn,) = simulation.groups[before].sequences
        assert turn.computed == expected, (between, updates)
        assert plan.counts == {turn: 30 - expected}


def test_what_older_weights_computed_is_not_found_by_new_prompts() -> None:
    simulation = simulated(step_tokens=10)
    simulation.submit(prompt=18, n=1, length=6, common=18)
    simulation.step()  # 10 tokens under version 0
    simulation.update()
    simulation.step()  # 8 more under version 1, on top of those
    simulation.submit(prompt=18, n=1, length=6, common=18)
    simulation.step()
    old, new = (group.sequences[0] for group in simulation.groups)
    assert set(old.pages).isdisjoint(new.pages)
