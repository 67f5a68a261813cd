import time
from io import StringIO

from rich.console import Console

from burnish.console import display
from burnish.console.display import Display, figures
from burnish.console.progress import Progress
from tests.console.test_progress import Clock


class Terminal(StringIO):
    def isatty(self):
        return True


def lines(console):
    return console.file.getvalue().splitlines()


def test_sampling_outside_of_a_run_has_a_line_too(monkeypatch):
    monkeypatch.setattr(display, "EVERY", 0.01)
    console = Console(file=StringIO(), width=200)
    with Display("answers", console) as show:
        show(Progress("generate", "sampling 2 responses", total=2, unit="responses"))
        time.sleep(0.1)
    assert "] sampling 2 responses  0/2 responses" in console.file.getvalue()


def test_lines_of_a_pipe(monkeypatch):
    monkeypatch.setattr(display, "EVERY", 1000)
    console, clock = Console(file=StringIO(), width=80), Clock()
    with Display("run", console, clock=clock) as show:
        show(Progress("load", "loading torch"))
        show(Progress("evaluate", "evaluating 64 prompts before the first step", 0, 64, step=0))
        show(Progress("evaluate", "evaluating 64 prompts before the first step", 9, 64, step=0))
        show(Progress("generate", "sampling", step=0, steps=3))
        metrics = {"rollout/reward": 0.5, "train/loss": 2.0, "validation/reward": 0.25}
        show(Progress("step", "", step=1, steps=3, seconds_left=70, metrics=metrics))
        show(Progress("checkpoint", "saving a checkpoint", step=1, steps=3))
        clock.now += 5
        show.beat()
        show(Progress("evaluate", "evaluating", step=3, steps=3, seconds_left=0.2))
        clock.now += 60
        show.beat()
    assert lines(console) == [
        "[0:00:00] loading torch",
        "[0:00:00] evaluating 64 prompts before the first step  0/64 ",
        "step 1/3  reward 0.500  held out 0.250  0:01:10 left",
        "[0:00:05] saving a checkpoint  reward 0.500  held out 0.250",
        "[0:01:05] evaluating  reward 0.500  held out 0.250",
    ]


def test_no_text_is_taken_for_an_emoji_or_markup():
    for is_live in (True, False):
        console = Console(file=Terminal(), width=200, force_terminal=is_live, no_color=True)
        with Display("rw.py:x: [red]", console) as show:
            show(Progress("load", "reading rw.py:x: and [red]"))
            show.beat()
            show.print_line("a note :warning:")
        shown = console.file.getvalue()
        assert "reading rw.py:x: and [red]" in shown
        assert "a note :warning:" in shown
        assert not is_live or "rw.py:x: [red]" in shown


def test_responses_that_got_no_grade_or_ran_late_are_shown():
    metrics = {"rollout/reward": 0.5, "rollout/responses": 96.0}
    trouble = {"rollout/grades_timeout": 3 / 96, "rollout/grades_error": 2 / 96}
    assert figures(Progress("step", "", metrics=metrics)) == "reward 0.500"
    shown = figures(Progress("step", "", metrics=metrics | trouble))
    assert shown == "reward 0.500  3 timed out  2 not graded"


def test_a_quiet_display_writes_a_line_per_step(monkeypatch):
    monkeypatch.setattr(display, "EVERY", 0.01)
    console = Console(file=StringIO())
    with Display("run", console, quiet=True) as show:
        show(Progress("load", "loading torch"))
        time.sleep(0.05)
        show(Progress("step", "", step=1, steps=3, metrics={"train/loss": 2.0}))
    assert lines(console) == ["step 1/3  loss 2.000"]


def test_a_quiet_display_says_what_takes_long(monkeypatch):
    monkeypatch.setattr(display, "QUIET_EVERY", 0.05)
    console = Console(file=StringIO(), width=200)
    with Display("run", console, quiet=True) as show:
        show(
            Progress("evaluate", "evaluating 9 prompts", 9, 9, "responses", grading="2 of 9 graded")
        )
        time.sleep(0.3)
    first, *_ = lines(console)
    assert first.endswith("] evaluating 9 prompts  9/9 responses  2 of 9 graded")
    assert len(lines(console)) < 8
