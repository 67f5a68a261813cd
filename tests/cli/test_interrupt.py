"""Two signals: within a moment they are one request, later the second stops the run at once."""

import os
import signal
import time
from io import StringIO

import pytest
from rich.console import Console

from burnish.cli.interrupt import Interrupts
from burnish.console.display import Display
from burnish.console.progress import STEP_PHASES, Progress


def interrupt_twice(path, console, pause):
    with Interrupts(path, Display("run", console)) as signals:
        signals.show(Progress(next(iter(STEP_PHASES)), "sampling"))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("pause", "told"), [(0.0, "stopped and saved; continue with:"), (0.3, "stopped before the")]
)
def test_the_second_signal(pause, told, tmp_path, monkeypatch):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    console = Console(file=StringIO(), width=200)
    with pytest.raises(SystemExit) as ended:
        interrupt_twice(tmp_path / "run", console, pause)
    assert ended.value.code == 130
    first, last = console.file.getvalue().splitlines()[-2:]
    assert first == "stopping after this step; once more to stop at once"
    assert last.startswith(told)
