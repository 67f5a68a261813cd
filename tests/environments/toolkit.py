"""Tools for the tests. They import only the standard library."""

import contextlib
import os
import subprocess
import sys
import time
from typing import Literal

DRAWN = []


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


add.deterministic = True


def note(text: str) -> list[str]:
    """Keep a text; return all texts of this episode."""
    DRAWN.append(text)
    return DRAWN


async def later(text: str, seconds: float = 0.0) -> str:
    """Return a text later."""
    import asyncio

    await asyncio.sleep(seconds)
    return text


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def fail(how: str) -> str:
    """Raise an exception."""
    if how == "odd":
        raise Odd
    if how == "exit":
        sys.exit(3)
    if how == "long":
        raise ValueError("x" * 10**6)
    if how == "system":
        raise KeyboardInterrupt
    raise ValueError(how)


def odd(
    how: Literal[
        "hang", "burn", "swallow", "stubborn", "memory", "print", "fork", "child", "long", "object",
        "lone", "none", "exit", "recursion", "nan", "escape", "grow",
    ],
) -> object:  # fmt: skip
    """Do something odd."""
    if how == "hang":
        time.sleep(60)
    if how == "burn":
        while True:
            pass
    if how == "swallow":
        while True:
            with contextlib.suppress(Exception):
                time.sleep(60)
    if how == "stubborn":
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)
    if how == "memory":
        return len(bytearray(1 << 40))
    if how == "print":
        for _ in range(1024):
            print("x" * (1 << 20))
        return "printed"
    if how == "fork":
        return "child" if os.fork() == 0 else "parent"
    if how == "child":
        subprocess.Popen(["sleep", "60"])
        return "started"
    if how == "escape":
        for _ in range(20):
            subprocess.Popen(["sleep", "60"], start_new_session=True)
        return "escaped"
    if how == "grow":
        kept = []
        while True:
            kept.append(bytearray(1 << 20))
    if how == "exit":
        os._exit(3)
    if how == "recursion":
        return odd(how)
    return {
        "long": "é" * 10**6,
        "object": {"a": [1, None, object]},
        "lone": "a\ud800b",
        "none": None,
        "nan": float("nan"),
    }[how]


def untyped(a):
    """Do."""


NUMBER = 3


class Counter:
    """An environment that counts the messages which call no tool."""

    deterministic = True

    def reset(self, row, seed):
        self.count = 0
        return [{"role": "user", "content": str(row.get("n", 0))}]

    def step(self, message):
        self.count += 1
        DRAWN.append(message["content"])
        done = self.count == 2
        return {"messages": [] if done else f"{self.count}", "reward": 1.0, "done": done}

    def close(self):
        print("closed")
