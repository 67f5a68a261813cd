"""Who runs in the next step, and on which pages: admission, chunked prefill, decode, preemption.

Sequences run in order of arrival. When pages run out, the youngest gives its pages up and is
computed again later, so the oldest always moves on and any workload whose sequences fit one by one
finishes. No tensors here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from burnish.engine.pages import Pages
from burnish.engine.sequence import Prefix, RequestGroup, Sequence

STEP_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens that an engine runs at once, by device."""


@dataclass(frozen=True)
class EngineSettings:
    kv_bytes: int = 1 << 30
    """Memory for keys and values; samples that do not fit wait, or are computed again later."""
    page_size: int = 16
    """Tokens per page, a multiple of 4."""
    max_running: int = 128
    """Samples that decode at once."""
    step_tokens: int = 1024
    """Tokens per step; longer prompts are computed in chunks."""
    on_update: Literal["keep", "recompute"] = "recompute"
    """Whether samples in flight keep their caches when weights are loaded."""


@dataclass
class Plan:
    """One step: these tokens of these sequences, after these page copies."""

    counts: dict[Sequence, int] = field(default_factory=dict)
    """Tokens of each sequence to run, from `computed` on."""
    copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """(from, to): a sequence is about to write into a page that others hold."""


class Scheduler:
    def __init__(self, settings: EngineSettings, pages: int) -> None:
        self.settings, self.pages = settings, Pages(pages, settings.page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, group: RequestGroup) -> None:
        self.waiting.extend(group.sequences)

    def plan(self) -> Plan:
        plan = Plan()
        budget = self.settings.step_tokens
        decoding = [s for s in self.running if s.pending == 1]
        filling = [s for s in self.running if s.pending > 1]
        for sequence in decoding + filling:
            count = min(sequence.pending, budget)
            if count and sequence.pages and self._make_room(sequence, count, plan):
                plan.counts[sequence] = count
                budget -= count
        self._admit(plan, budget)
        return plan

    def only_decodes(self, plan: Plan) -> bool:
        """Whether the plan gives each of its sequences a next token, and nobody waits for a step in
        which to begin.

        A count of 1 does not say so: a step's last token may go to a prompt that is far from done.
        """
        some_begin = bool(self.waiting) and len(self.running) < self.settings.max_running
        return not some_begin and all(sequence.pending == 1 for sequence in plan.counts)

    def reserve(self, plan: Plan, steps: int) -> bool:
        """Takes the pages for so many tokens of each sequence, if they are free; none otherwise."""
        ends = {s: self.pages.needed(s.computed + steps) for s in plan.counts}
        if sum(max(0, end - len(s.pages)) for s, end in ends.items()) > self.pages.free:
            return False
        for sequence, end in ends.items():
            self._grow(sequence, end)
        return True

    def advance(self, plan: Plan) -> list[Sequence]:
        """The plan has been run; returns the sequences whose next token can be sampled."""
        ready = []
        for sequence, count in plan.counts.items():
            self._name_pages(sequence, count)
            sequence.computed += count
            self._offer_prompt(sequence)
            if not sequence.pending:
                ready.append(sequence)
        return ready

    def finish(self, sequence: Sequence) -> None:
        """The sequence is complete or aborted."""
        (self.waiting if sequence.waits else self.running).remove(sequence)
        self._evict(sequence)

    def update(self) -> None:
        """The weights have changed."""
        self.pages.forget_names()
        if self.settings.on_update == "keep":
            for sequence in self.running:
                sequence.group.names = []
            return
        while self.running:
            self._requeue(self.running.pop())
        for sequence in self.waiting:
            self._evict(sequence)

    def _admit(self, plan: Plan, budget: int) -> None:
        slots = self.settings.max_running - len(self.running)
        if budget <= 0 or slots <= 0 or not self.waiting:
            return
        coming = {name for sequence in self.running for name in self._missing(sequence)}
        for sequence in list(self.waiting):
            if budget <= 0 or slots <= 0:
                return
            slots -= 1
            if not sequence.pages:
                names = sequence.group.page_names(self.pages.size)
                found = self.pages.find(names)
                if sequence.group.filler or not coming.isdisjoint(names[len(found) :][:1]):
                    continue  # its prompt, or the beginning, is being computed: it waits for that
            if not self._fits(sequence, len(sequence.prefix.pages if sequence.prefix else found)):
                return
            if not sequence.pages:
                sequence.group.filler = sequence
                self.pages.share(found)
                sequence.pages, sequence.computed = found, len(found) * self.pages.size
                coming.update(self._missing(sequence))
            self.waiting.remove(sequence)
            sequence.waits = False
            self.running.append(sequence)
            count = min(sequence.pending, budget)
            if not self._make_room(sequence, count, plan):
                return
            plan.counts[sequence] = count
            budget -= count

    def _fits(self, sequence: Sequence, shared: int) -> bool:
        """Whether its tokens, and a page of growth for each running sequence, find room beside the
        shared pages."""
        if not self.running:
            return True  # alone it always fits; `_make_room` takes pages that are held in reserve
        growth = min(len(self.running), self.pages.count // 16)
        return self.pages.free >= self.pages.needed(len(sequence.tokens)) - shared + growth

    def _missing(self, sequence: Sequence) -> list[bytes]:
        """Pages of its prompt that a running sequence has yet to fill."""
        if sequence.computed >= sequence.group.prompt_length:
            return []
        return sequence.group.page_names(self.pages.size)[sequence.computed // self.pages.size :]

    def _name_pages(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens are computed: the pages of the prompt that are full can be found."""
        if sequence.computed >= sequence.group.prompt_length:
            return
        first, end = (n // self.pages.size for n in (sequence.computed, sequence.computed + count))
        names = sequence.group.page_names(self.pages.size)[first:end]
        for page, name in zip(sequence.pages[first:], names, strict=False):
            self.pages.name(page, name)

    def _offer_prompt(self, filler: Sequence) -> None:
        """The filler has computed the prompt: samples that wait will start from its pages. The
        prompt's last token runs again in each, to predict its first token."""
        group, length = filler.group, filler.group.prompt_length
        if group.filler is not filler or filler.computed < length:
            return
        group.filler = None
        pages = filler.pages[: self.pages.needed(length)]
        prefix = Prefix(pages[: (length - 1) // self.pages.size])
        for sequence in group.sequences:
            if sequence.waits and not sequence.pages:
                self.pages.share(pages)
                sequence.pages, sequence.computed = list(pages), length - 1
                sequence.prefix = filler.prefix = prefix

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Finds pages for the next `count` tokens -> whether the sequence still has its pages."""
        pages = self.pages
        end = pages.needed(sequence.computed + count)
        first = sequence.computed // pages.size
        if len(sequence.pages) >= end and pages.holders[sequence.pages[first]] == 1:
            return True  # as in most steps
        while True:
            shared = first < len(sequence.pages) and pages.holders[sequence.pages[first]] > 1
            if pages.free >= end - len(sequence.pages) + shared:
                break
            if not self._reclaim(sequence, plan):
                return False
        if shared:
            old, own = sequence.pages[first], pages.allocate()
            pages.release([old])
            sequence.pages[first] = own
            plan.copies[sequence] = (old, own)
        self._grow(sequence, end)
        return True

    def _grow(self, sequence: Sequence, end: int) -> None:
        sequence.pages += [self.pages.allocate() for _ in range(end - len(sequence.pages))]

    def _reclaim(self, sequence: Sequence, plan: Plan) -> bool:
        """Frees pages for the sequence -> False if it had to give up its own."""
        for waiting in reversed(self.waiting):
            if waiting.pages:
                self._evict(waiting)
                return True
        victim = self.running.pop()
        self._requeue(victim)
        self.preemptions += 1
        plan.counts.pop(victim, None)
        plan.copies.pop(victim, None)
        return victim is not sequence

    def _requeue(self, sequence: Sequence) -> None:
        self._evict(sequence)
        sequence.waits = True
        self.waiting.appendleft(sequence)

    def _evict(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages, sequence.prefix, sequence.computed = [], None, 0
        if sequence.group.filler is sequence:
            sequence.group.filler = None
