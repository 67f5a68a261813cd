"""The guardian kills whatever is left, also when the process of the pool dies."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments.conftest import GAMES, alive, descendants, gone

SCRIPT = """
import sys, time
from burnish.environments.pool import EnvironmentPool
pool = EnvironmentPool(sys.argv[1])
pool.reset([("a", {}, 0), ("b", {}, 0)])
pool.step([("a", {"role": "assistant", "content": "escape " + sys.argv[2]})])
print("ready", flush=True)
if sys.argv[3] == "busy":
    pool.step([("b", {"role": "assistant", "content": "sleep 15"})])
if sys.argv[3] != "exits":
    time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "exits"])
def test_processes_end_with_the_process_of_the_pool(tmp_path, state):
    root = str(Path(__file__).parents[2])
    arguments = [f"{GAMES}:Echo", str(tmp_path / "pid"), state]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        escaped = int((tmp_path / "pid").read_text())
        processes = {escaped, *descendants(parent.pid)}
        if state == "exits":
            parent.wait(30)
        else:
            assert alive(escaped)
            parent.send_signal(signal.SIGKILL)
    assert all(map(gone, processes))
