"""Rewards that a worker loads: the response says what to do."""

import asyncio
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
        "warn in colour": lambda: float(print("\x1b[31mred", file=sys.stderr, flush=True) is None),
        "read": lambda: float(sys.stdin.read() == ""),
        "input": lambda: float(input()),
        "fork": _fork,
        "fork and hang": _fork_and_hang,
        "leave a process": _leave_a_process,
        "modules": lambda: float("torch" in sys.modules or "numpy" in sys.modules),
        "pid": os.getpid,
        "hash": lambda: hash("text"),
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


def in_batch(responses, rows):
    """Grades all responses of a call at once, by their place in it, unless one says otherwise."""
    actions = {
        "sleep": lambda: time.sleep(600),
        "raise": lambda: 1 / 0,
        "exit": lambda: os._exit(3),
        "short": lambda: responses.pop(),
    }
    for response in list(responses):
        actions.get(response, int)()
    if "dict" in responses:
        return {"reward": 1.0}
    results = [float(rows[k].get("n", k)) for k in range(len(responses))]
    return [math.nan if r == "nan" else value for r, value in zip(responses, results, strict=True)]


in_batch.batched = True


class Concurrent:
    most = now = 0


async def concurrently(response, row):
    """Returns how many calls have run at the same time so far, unless the response says
    otherwise."""
    Concurrent.now += 1
    Concurrent.most = max(Concurrent.most, Concurrent.now)
    try:
        if response == "block":
            time.sleep(600)
        if response == "raise":
            raise ValueError("no")
        if response == "exit":
            os._exit(3)
        await asyncio.sleep(600 if response == "sleep" else 0.05)
    finally:
        Concurrent.now -= 1
    return {"reward": float(response) if response.isdecimal() else 0.0, "most": Concurrent.most}


async def in_async_batch(responses, rows):
    await asyncio.sleep(0)
    return [float(len(responses))] * len(responses)


in_async_batch.batched = True


async def async_generator(response, row):
    yield 1.0


def generator(response, row):
    yield 1.0


def one_argument(response):
    return 1.0


def trl(completions, **kwargs):
    return [1.0] * len(completions)


NOT_A_FUNCTION = 3
