"""Rewards that a worker loads: the response says what to do."""

import math
import os
import subprocess
import sys
import time


def obedient(response, row):
    """Does what the response says; a number is its own reward."""
    actions = {
        "burn": lambda: 9**9**9,
        "burn in python": _burn,
        "burn a while": _burn_a_while,
        "sleep": lambda: time.sleep(600),
        "allocate": lambda: len(bytearray(10 << 30)),
        "raise": lambda: 1 / 0,
        "raise in colour": _raise_in_colour,
        "exit": lambda: os._exit(3),
        "exit quietly": lambda: os._exit(0),
        "sys.exit": sys.exit,
        "nan": lambda: math.nan,
        "inf": lambda: -math.inf,
        "string": lambda: "1.0",
        "none": lambda: None,
        "list": lambda: [1.0, 2.0],
        "no reward": lambda: {"score": 1.0},
        "bad part": lambda: {"reward": 1.0, "format": "good"},
        "unparsed": lambda: {"reward": 0.0, "status": "unparsed"},
        "unparsed but paid": lambda: {"reward": 1.0, "status": "unparsed"},
        "parts": lambda: {"reward": 1, "format": True, "answer": 0.5},
        "print": _print,
        "read": lambda: float(sys.stdin.read() == ""),
        "input": lambda: float(input()),
        "fork": _fork,
        "fork and hang": _fork_and_hang,
        "leave a process": _leave_a_process,
        "modules": lambda: float("torch" in sys.modules or "numpy" in sys.modules),
        "pid": os.getpid,
        "row": lambda: row["value"],
    }
    if response in actions:
        return actions[response]()
    return float(response)


def length(response, row):
    return len(response)


def leaking(response, row, kept=[]):  # noqa: B006 the list is meant to grow
    kept.append(bytearray(4 << 20))
    return 1.0


def _raise_in_colour():
    raise ValueError("\x1b[31mred\x07")


def _burn():
    while True:
        pass


def _burn_a_while():
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return 1.0


def _print():
    print("not a frame")
    sys.stdout.flush()
    os.write(1, b"\x00\x00\x00\x02[]")
    return 1.0


def _fork():
    return float(os.fork() > 0)


def _fork_and_hang():
    if os.fork() == 0:
        time.sleep(600)
    os._exit(4)


def _leave_a_process():
    return subprocess.Popen(["sleep", "600"]).pid
