"""The thread that kills actors: it touches only processes of this machine."""

import json
import os
import subprocess
import sys
import time

from burnish.cli.chaos import Killer


def test_an_actor_of_another_machine_is_not_killed(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    here, there = subprocess.Popen(command), subprocess.Popen(command)
    places = {
        "generator": {"host": "another-machine", "pid": there.pid},
        "learner": {"host": os.uname().nodename, "pid": here.pid},
    }
    (tmp_path / "actors.json").write_text(json.dumps(places))
    killer = Killer(tmp_path, kills=2, seed=0, pause=0.01)
    try:
        killer.start()
        here.wait(30)
        time.sleep(0.2)  # time for the second kill
        assert (killer.killed, there.poll()) == (["learner"], None)
    finally:
        killer.end()
        for child in (here, there):
            child.kill()
            child.wait()
