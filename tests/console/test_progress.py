from types import SimpleNamespace

from burnish.console import progress
from burnish.console.progress import (
    Progress,
    after,
    begin,
    format_progress,
    showing,
    tell,
    tell_grading,
    tell_turn,
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_phase_reports_how_far_it_is_and_how_fast(monkeypatch):
    seen, clock = [], Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    with showing(seen.append):
        report = begin("evaluate", "evaluating", total=8, unit="responses")
    clock.now += 2.0
    report(3, tokens=50)
    after(report, 4, tokens=60)(1, 2, tokens=20)
    assert [(p.done, p.total, p.tokens_per_second) for p in seen] == [
        (0, 8, None),
        (3, 8, 25.0),
        (5, 8, 40.0),
    ]


def test_progress_is_shown_inside_a_block_alone():
    seen = []
    with showing(seen.append):
        tell("compile", "compiling the kernel norm")
    tell("compile", "compiling the kernel gate")
    assert seen == [Progress("compile", "compiling the kernel norm")]


def test_the_turn_of_episodes_is_a_part_of_their_phase():
    seen = []
    with showing(seen.append):
        tell_turn("turn 9 of 9")  # no phase has begun that could show it
        report = begin("generate", "sampling", total=8, unit="responses")
        tell_turn("turn 1 of 12")
        tell_turn("turn 1 of 12")
        report(3)
        tell_turn("turn 2 of 12")
        tell_grading(1, 8, late=0, failed=0)
        begin("grade", "grading")
    assert [(p.turn, p.done) for p in seen] == [
        ("", 0),
        ("turn 1 of 12", 0),
        ("turn 1 of 12", 3),
        ("turn 2 of 12", 3),
        ("turn 2 of 12", 3),
        ("", 0),
    ]
    assert format_progress(seen[3]) == "sampling, 3 of 8 responses, turn 2 of 12"
