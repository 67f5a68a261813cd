"""Plan each step: which sequences compute how many tokens, and in which pages.

Sequences run in order of arrival. When pages run out, the youngest sequence is preempted: it
releases its pages and is recomputed later. The oldest therefore always advances, at the latest
after `DELAYS` steps with prompts, and every workload finishes whose sequences fit one by one. This
module uses no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from burnish.engine.native.pages import Pages
from burnish.engine.native.sequence import Prefix, RequestGroup, Sequence, names_of_pages
from burnish.engine.settings import EngineSettings
from burnish.types import Finish

DELAYS = 32
"""Maximum number of consecutive steps with prompts for which sequences that decode wait."""


@dataclass
class Plan:
    """The tokens that a step computes for each sequence, and the pages to copy before the step."""

    counts: dict[Sequence, int] = field(default_factory=dict)
    """Number of tokens to compute for each sequence, beginning at `Sequence.computed`."""
    copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """Pages (source, target) to copy, for each sequence that will write to a page with other
    holders."""


class Scheduler:
    """Decides which sequences each step computes, and allocates and releases their pages."""

    def __init__(self, settings: EngineSettings, pages: int, *, prompts_first: bool) -> None:
        """``pages``: number of pages of the cache. ``prompts_first``: whether sequences that decode
        wait while a prompt can be computed, because the device decodes much faster in steps that
        only decode."""
        self.settings, self.pages = settings, Pages(pages, settings.page_size)
        self.prompts_first = prompts_first
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = self.updates = 0
        self._is_full = False
        """Whether the first waiting sequence did not fit, and no pages have been released since."""
        self._delays = 0
        """Number of consecutive steps with prompts alone."""

    def add(self, group: RequestGroup) -> None:
        """Queue all samples of a request."""
        self.waiting.extend(group.sequences)

    def plan(self) -> Plan:
        """Plan the next step and allocate its pages: first sequences that decode, then prompts in
        progress, then waiting sequences that can start; or, with ``prompts_first``, prompts alone
        if there are any. Sequences are preempted if pages run out. The caller must copy the plan's
        pages, run the step, and call `advance`."""
        decoding = [sequence for sequence in self.running if sequence.pending == 1]
        plan = self.plan_unread()
        if not plan.counts:
            self._delays = 0
            plan = self._plan(decoding)
        return plan

    def plan_unread(self) -> Plan:
        """Plan a step with prompts alone, which may follow a step whose new tokens are not known
        yet. It is empty unless prompts come first, and after `DELAYS` such steps, so that sequences
        that decode advance. See `plan`.

        No sequence that gets a token from the step before is preempted: at most one prompt is in
        progress, it is the youngest sequence, and only the youngest is preempted.
        """
        if not self.prompts_first or self._delays >= DELAYS:
            return Plan()
        self._delays += 1
        return self._plan([])

    def _plan(self, decoding: list[Sequence]) -> Plan:
        """Plan some sequences that decode, then prompts in progress, then waiting sequences."""
        plan = Plan()
        filling = [sequence for sequence in self.running if sequence.pending > 1]
        self._admit(plan, self._continue(plan, decoding + filling, self.settings.step_limit))
        return plan

    def _continue(self, plan: Plan, sequences: list[Sequence], budget: int) -> int:
        """Add up to ``budget`` tokens of running sequences to the plan; return how many more it may
        have."""
        for sequence in sequences:
            count = min(sequence.pending, budget)
            if count and sequence.pages and self._make_room(sequence, count, plan):
                plan.counts[sequence] = count
                budget -= count
        return budget

    def only_decodes(self, plan: Plan) -> bool:
        """Whether every sequence of the plan decodes, no waiting sequence could start, and no other
        sequence waits for the plan's prompts.

        A count of 1 is not sufficient: the last token of a step may belong to a longer prompt.
        """
        some_wait = self.prompts_first and len(plan.counts) < len(self.running)
        decodes = all(sequence.pending == 1 for sequence in plan.counts)
        return decodes and not some_wait and not self.some_begin

    @property
    def some_begin(self) -> bool:
        """Whether a waiting sequence might start now."""
        has_place = len(self.running) < self.settings.max_running
        return bool(self.waiting) and has_place and not self._is_full

    def reserve(self, sequences: Iterable[Sequence], steps: int) -> bool:
        """Allocate pages for the next ``steps`` tokens of each sequence, but for no more than it
        has room for, and return True. If too few pages are free, allocate nothing and return
        False."""
        ends = {s: self.pages.needed(s.computed + min(steps, s.room)) for s in sequences}
        if sum(max(0, end - len(s.pages)) for s, end in ends.items()) > self.pages.free:
            return False
        for sequence, end in ends.items():
            self._grow(sequence, end)
        return True

    def advance(self, plan: Plan) -> list[Sequence]:
        """Record that the plan was run; return the sequences whose next token can be sampled. Call
        this once for each plan, before the new tokens are appended."""
        ready = []
        for sequence, count in plan.counts.items():
            self._name_pages(sequence, count)
            sequence.computed += count
            self._offer_prompt(sequence)
            if not sequence.pending:
                ready.append(sequence)
        return ready

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that is complete or aborted from the queue or the running ones, and
        release its pages; those of an episode's turn are kept for its next turn."""
        (self.waiting if sequence.waits else self.running).remove(sequence)
        is_whole = sequence.finish is not None and sequence.finish is not Finish.ABORT
        if sequence.group.request.continues and is_whole and sequence.update == self.updates:
            tokens, size = sequence.tokens[: sequence.computed], self.pages.size
            names = names_of_pages(tokens, size, partial=True)
            self.pages.keep(sequence.key, names, sequence.pages[: len(names)], len(tokens))
        self._evict(sequence)

    def update(self) -> None:
        """Adapt to new weights: new requests must not reuse pages of older weights, and samples in
        flight release their pages, to be recomputed, unless on_update is "keep"."""
        self.pages.forget_names()
        self.updates += 1
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
                kept, computed = self._kept(sequence, len(found) * self.pages.size)
                found = kept or found
                full = computed // self.pages.size
                if sequence.group.filler or not coming.isdisjoint(names[full:][:1]):
                    continue  # its prompt, or a prefix of it, is being computed
            shared = sequence.prefix.pages if sequence.prefix else found
            if not self._fits(sequence, self.pages.held(shared)):
                self._is_full = True
                return
            if not sequence.pages:
                sequence.group.filler, sequence.update = sequence, self.updates
                if kept:
                    self.pages.take(sequence.key, kept)
                else:
                    self.pages.share(found)
                sequence.pages, sequence.computed = found, computed
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
        """Whether a waiting sequence may start. It may if nothing runs. Otherwise the free pages
        must suffice for its tokens, of which ``shared`` pages have a holder already, plus one page
        for each running sequence, up to a sixteenth of all pages."""
        if not self.running:
            return True  # alone it always fits: `_make_room` evicts waiting sequences
        growth = min(len(self.running), self.pages.count // 16)
        return self.pages.free >= self.pages.needed(len(sequence.tokens)) - shared + growth

    def _kept(self, sequence: Sequence, known: int) -> tuple[list[int], int]:
        """Return the pages that are kept from the episode's last turn, and the number of tokens in
        them; no pages and ``known`` if other sequences hold the first ``known`` tokens, and these
        are as many."""
        group, size = sequence.group, self.pages.size
        length = 0 if group.request.begun is None else self.pages.kept_length(sequence.key)
        if length <= known:
            return [], known
        names = group.page_names(size)
        if length % size and length < group.prompt_length:  # the last page is not full
            names = names_of_pages(group.given[:length], size, partial=True)
        kept = self.pages.kept(sequence.key, names)
        length = min(length, len(kept) * size)
        return (kept, length) if length > known else ([], known)

    def _missing(self, sequence: Sequence) -> list[bytes]:
        """Return the names of the full pages of a sequence's prompt that are not computed yet; an
        empty list if the whole prompt is computed."""
        if sequence.computed >= sequence.group.prompt_length:
            return []
        return sequence.group.page_names(self.pages.size)[sequence.computed // self.pages.size :]

    def _name_pages(self, sequence: Sequence, count: int) -> None:
        """Name the pages of the prompt that the sequence's next ``count`` computed tokens fill, so
        that other requests find them."""
        if sequence.computed >= sequence.group.prompt_length:
            return
        first, end = (n // self.pages.size for n in (sequence.computed, sequence.computed + count))
        names = sequence.group.page_names(self.pages.size)[first:end]
        for page, name in zip(sequence.pages[first:], names, strict=False):
            self.pages.name(page, name)

    def _offer_prompt(self, filler: Sequence) -> None:
        """If a filler has computed the whole prompt, share the prompt's pages with the waiting
        samples of its group. Each of them computes the prompt's last token again, to predict its
        first token."""
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
                sequence.update = filler.update
                sequence.prefix = filler.prefix = prefix

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Allocate pages for the sequence's next ``count`` tokens, and plan a copy of a shared page
        that it will write to. If too few pages are free, evict waiting sequences and preempt
        younger ones; return False if the sequence itself was preempted, otherwise True."""
        pages = self.pages
        end = pages.needed(sequence.computed + count)
        first = sequence.computed // pages.size
        if len(sequence.pages) >= end and pages.holders[sequence.pages[first]] == 1:
            return True  # the common case
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
        """Release the pages of the last waiting sequence that has any, or else preempt the youngest
        running sequence. Return False if the preempted sequence is ``sequence`` itself."""
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
        self._is_full = False
        self.pages.release(sequence.pages)
        sequence.pages, sequence.prefix, sequence.computed = [], None, 0
        if sequence.group.filler is sequence:
            sequence.group.filler = None
