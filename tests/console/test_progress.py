from types import SimpleNamespace

from burnish.console import progress
from burnish.console.progress import Progress, after, begin, showing, tell


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
