"""The ledger: an append-only log of the groups that were sampled, trained on or dropped.

A group is the sampled responses to one prompt. Each start of the run, the first one or a resume, is
an incarnation. A resumed run does not truncate the ledger. Its rows show whether each group was
trained on as often as the loop's settings allow, even if processes died during the run.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burnish.runs import timeline
from burnish.runs.metrics import iterate_rows

FILE = "ledger.jsonl"
Row = Mapping[str, Any]


class Ledger:
    """Appends events to the ledger and to the timeline. Each row is flushed at once."""

    def __init__(self, run: Path, incarnation: int, step: int) -> None:
        """Record the start of an incarnation of the run, which continues after ``step``."""
        self._run, self._incarnation = run, incarnation
        self.write("start", step=step)

    def write(self, event: str, **fields: Any) -> None:
        """Append an event to the ledger, or to the timeline if it is "worked", an actor's call."""
        row = {"event": event, "incarnation": self._incarnation, **fields, "time": time.time()}
        name = timeline.FILE if event == "worked" else FILE
        with (self._run / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def learned(self, step: int, groups: Sequence[int], *, oldest: int, version: int) -> None:
        """Record a training step on these groups. ``oldest`` is the weight version that sampled the
        oldest token, ``version`` the learner's version before the step."""
        self.write("learned", step=step, groups=groups, oldest=oldest, version=version)


class LedgerVerdict(NamedTuple):
    """Counts of a ledger's events, and the problems that a check of the ledger has found."""

    steps: int
    groups: int
    """Number of groups that were trained on."""
    dropped: int
    """Number of groups that were dropped without being trained on."""
    reissued: int
    """Number of groups that were sampled more than once."""
    restarts: int
    lag: int
    """Largest lag of a step: the learner's weight version minus that of the oldest token."""
    problems: tuple[str, ...]
    """Violations of the expected bookkeeping; empty if there are none."""

    def __str__(self) -> str:
        counts = (
            f"{self.steps} steps learned from {self.groups} groups; {self.dropped} were dropped, "
            f"{self.reissued} sampled again, after {self.restarts} restarts; the largest lag was "
            f"{self.lag} versions"
        )
        return "\n".join([counts, *(self.problems or ["every group is accounted for"])])


def judge(
    run: Path, *, batch: int, window: int, max_uses: int = 1, max_lag: int | None = None
) -> LedgerVerdict:
    """Check the ledger of a run; return its counts and the problems found.

    No step may be missing or repeated. Each step has ``batch`` groups (fewer only if some were
    dropped), and each group was dropped or trained on, at most ``max_uses`` times. ``window`` is
    the largest number of groups that the run may hold at once: groups that were in flight when it
    ended are not missing. ``max_lag`` is the largest lag in weight versions that is allowed; None
    if there is no bound.
    """
    rows = list(iterate_rows(run / FILE))
    return judge_rows(rows, batch=batch, window=window, max_uses=max_uses, max_lag=max_lag)


def judge_rows(
    rows: Sequence[Row], *, batch: int, window: int, max_uses: int = 1, max_lag: int | None = None
) -> LedgerVerdict:
    """Check a ledger's rows, in the order of the file, as `judge` checks a run's. The arguments are
    the same."""
    learned, dropped = rows_in_effect(rows)
    uses = Counter(group for row in learned for group in row["groups"])
    gone = {row["group"] for row in dropped}
    steps = [row["step"] for row in learned]
    lag = max((row["version"] - row["oldest"] for row in learned if row["groups"]), default=0)
    last = max([*uses, *gone], default=-1)
    missing = [n for n in range(last) if n not in uses and n not in gone]
    if len(missing) <= window - batch:  # groups that were in flight when the run ended
        missing = []
    found = {
        "steps are missing or repeated": _wrong_steps(steps),
        f"groups were learned from more than {max_uses} times": _over(uses, max_uses),
        "groups were dropped and learned from": sorted(gone & set(uses)),
        "steps have another number of groups": _odd_steps(learned, dropped, batch),
        "groups were neither learned from nor dropped": missing,
    }
    problems = [f"{what}: {reprlib.repr(numbers)}" for what, numbers in found.items() if numbers]
    if max_lag is not None and lag > max_lag:
        problems.append(f"the largest lag is {lag} versions, and the bound is {max_lag}")
    sampled = Counter(row["group"] for row in rows if row["event"] == "sampled")
    return LedgerVerdict(
        steps=len(set(steps)),
        groups=len(uses),
        dropped=len(gone),
        reissued=sum(count > 1 for count in sampled.values()),
        restarts=sum(row["event"] == "start" for row in rows) - 1,
        lag=lag,
        problems=tuple(problems),
    )


def rows_in_effect(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Return the "learned" rows and the "dropped" rows that are in effect: an incarnation that
    continues after a step cancels all rows of later steps before it."""
    kept: dict[str, list[Row]] = {"learned": [], "dropped": []}
    for row in rows:
        if row["event"] == "start":
            for event, before in kept.items():
                kept[event] = [one for one in before if one["step"] <= row["step"]]
        elif row["event"] in kept:
            kept[row["event"]].append(row)
    return kept["learned"], kept["dropped"]


def lags(rows: Iterable[Row]) -> Counter[int]:
    """Return the number of groups that were trained on at each lag, which is the learner's weight
    version minus the version that sampled the group's oldest token. A group that was trained on
    twice counts twice."""
    rows = list(rows)
    oldest = {row["group"]: row["oldest"] for row in rows if row["event"] == "sampled"}
    learned = [(row, group) for row in rows_in_effect(rows)[0] for group in row["groups"]]
    return Counter(row["version"] - oldest.get(group, row["oldest"]) for row, group in learned)


def _wrong_steps(steps: Sequence[int]) -> list[int]:
    wanted = Counter(range(1, max(steps, default=0) + 1))
    return sorted((Counter(steps) - wanted) + (wanted - Counter(steps)))


def _over(uses: Mapping[int, int], limit: int) -> list[int]:
    return sorted(group for group, count in uses.items() if count > limit)


def _odd_steps(learned: Sequence[Row], dropped: Sequence[Row], batch: int) -> list[int]:
    """Return the steps with an unexplained number of groups: more than ``batch``, or fewer by more
    than the number of groups that were dropped at that step as "error", "overlong" or "dead"."""
    lost = Counter(
        row["step"] for row in dropped if row.get("why") in ("error", "overlong", "dead")
    )
    sizes = {row["step"]: len(row["groups"]) for row in learned}
    return [step for step, size in sizes.items() if not size <= batch <= size + lost[step]]
