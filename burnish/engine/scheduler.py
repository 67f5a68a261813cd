"""Who runs in the next step, and on which pages: admission, chunked prefill, decode, preemption.

Sequences run in order of arrival. When pages run out, the youngest gives its pages up and is
computed again later, so the oldest always moves on and any workload whose sequences fit one by one
finishes. No tensors here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from burnish.engine.pages import Pages
from burnish.engine.sequence import Prefix, RequestGroup, Sequence


@dataclass
class Plan:
    """One step: these tokens of these sequences, after these page copies."""

    counts: dict[Sequence, int] = field(default_factory=dict)
    """Tokens of each sequence to run, from `computed` on."""
    copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """(from, to): a sequence is about to write into a page that others hold."""


class Scheduler:
    def __init__(self, pages: Pages, *, max_running: int, step_tokens: int, keep: bool) -> None:
        """keep: an update leaves caches as they are; otherwise it has everything computed again."""
        self.pages = pages
        self.max_running, self.step_tokens, self.keep = max_running, step_tokens, keep
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, group: RequestGroup) -> None:
        self.waiting.extend(group.sequences)

    def plan(self) -> Plan:
        plan = Plan()
        budget = self.step_tokens
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
        some_begin = bool(self.waiting) and len(self.running) < self.max_running
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
        sequence.waits = False
        self._evict(sequence)
        self._close(sequence.group)

    def update(self) -> None:
        """The weights have changed."""
        self.pages.forget_names()
        if self.keep:
            for sequence in self.running:
                sequence.group.names = []
            return
        while self.running:
            self._requeue(self.running.pop())
        for sequence in self.waiting:
            self._drop_hold(sequence.group)

    def _admit(self, plan: Plan, budget: int) -> None:
        slots = self.max_running - len(self.running)
        if budget <= 0 or slots <= 0 or not self.waiting:
            return
        coming = {name for sequence in self.running for name in self._missing(sequence)}
        for sequence in list(self.waiting):
            if budget <= 0 or slots <= 0:
                return
            slots -= 1
            group = sequence.group
            names = group.page_names(self.pages.size) if group.prefix is None else []
            found = self.pages.find(names)
            if group.filler is not None or not coming.isdisjoint(names[len(found) :][:1]):
                continue  # the prompt or its beginning is being computed: this one joins after that
            if not self._fits(sequence, len(found)):
                return
            self.waiting.remove(sequence)
            sequence.waits = False
            self.running.append(sequence)
            if group.prefix is not None:
                self._join(sequence, group.prefix)
            else:
                group.filler = sequence
                self.pages.share(found)
                sequence.pages, sequence.computed = found, len(found) * self.pages.size
                coming.update(self._missing(sequence))
            count = min(sequence.pending, budget)
            if not self._make_room(sequence, count, plan):
                return
            plan.counts[sequence] = count
            budget -= count
            self._close(group)

    def _fits(self, sequence: Sequence, found: int) -> bool:
        """Whether its tokens, and a page of growth for each running sequence, find room."""
        if not self.running:
            return True  # alone it always fits; `_make_room` takes pages that are held in reserve
        prefix = sequence.group.prefix
        shared = prefix.whole if prefix else found
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

    def _join(self, sequence: Sequence, prefix: Prefix) -> None:
        """Start from the group's prompt; its last token runs again, to predict the first sample."""
        self.pages.share(prefix.pages)
        sequence.pages = list(prefix.pages)
        sequence.prefix = prefix
        sequence.computed = sequence.group.prompt_length - 1

    def _offer_prompt(self, sequence: Sequence) -> None:
        """The filler has computed the prompt: the group holds it if samples wait to join."""
        group = sequence.group
        if group.filler is not sequence or sequence.computed < group.prompt_length:
            return
        group.filler = None
        if any(mate.waits for mate in group.sequences):
            pages = tuple(sequence.pages[: self.pages.needed(group.prompt_length)])
            whole = (group.prompt_length - 1) // self.pages.size
            group.prefix = sequence.prefix = Prefix(pages, whole)
            self.pages.share(pages)

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
        for group in {s.group: None for s in self.waiting if s.group.prefix is not None}:
            if not any(mate.pages for mate in group.sequences):
                self._drop_hold(group)
                return True
        victim = self.running[-1]
        if victim is sequence and len(self.running) == 1:
            assert sequence.group.prefix is not None, "one sequence alone fits: submit checked it"
            self._drop_hold(sequence.group)
            return True
        self._requeue(self.running.pop())
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

    def _close(self, group: RequestGroup) -> None:
        """Let go of the prompt once no sample waits to join."""
        if group.prefix is not None and not any(s.waits for s in group.sequences):
            self._drop_hold(group)

    def _drop_hold(self, group: RequestGroup) -> None:
        if group.prefix is not None:
            self.pages.release(group.prefix.pages)
            group.prefix = None
