"""Environments for the tests. They import only the standard library."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path


class Echo:
    """Does what the model's message says."""

    deterministic = True

    def reset(self, row, seed):
        self.row, self.seed, self.steps = row, seed, 0
        if row.get("reset"):
            return self.obey(row["reset"])
        return f"begin {row.get('n', 0)} {seed}"

    def step(self, message):
        assert message["role"] == "assistant"
        self.steps += 1
        return self.obey(message["content"])

    def obey(self, text):
        word, _, rest = text.partition(" ")
        return getattr(self, word)(rest) if hasattr(self, word) else f"{self.steps} {text}"

    def value(self, code):
        return eval(code)

    def pid(self, _):
        return {"messages": "pid", "metrics": {"pid": os.getpid()}}

    def sleep(self, seconds):
        time.sleep(float(seconds))
        return "slept"

    def burn(self, _):
        while True:
            sum(range(10_000_000))

    def allocate(self, _):
        return str(len(bytearray(1 << 32)))

    def exit(self, code):
        os._exit(int(code))

    def crash(self, number):
        os.kill(os.getpid(), int(number))
        time.sleep(60)

    def fork(self, number):
        for _ in range(int(number)):
            if not os.fork():
                time.sleep(600)
        return "forked"

    def fork_and_return(self, _):
        os.fork()
        return "both"

    def escape(self, file):
        """A daemon: two forks with a session of their own, whose parents exit."""
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.setsid()
                Path(file).write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        os.wait()
        while not (Path(file).exists() and Path(file).read_text()):
            time.sleep(0.01)
        return "escaped"

    def detach(self, file):
        """A program in a session of its own with an empty environment."""
        code = f"import os, time; open({file!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env={})
        while not (Path(file).exists() and Path(file).read_text()):
            time.sleep(0.01)
        return "detached"

    def fail_detached(self, file):
        self.escape(file)
        os._exit(7)

    def print(self, megabytes):
        for _ in range(int(megabytes)):
            os.write(1, b"a line of output\n" * (1 << 16))
        return "printed"

    def garbage(self, _):
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\xff" * 100)
        time.sleep(60)

    def forge(self, _):
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\0\0\0\x13" + b'{"reward": "a text"')
        time.sleep(60)

    def long(self, megabytes):
        return "x" * (int(megabytes) << 20)

    def draw(self, _):
        return str(random.random())

    def descriptors(self, _):
        return str(len(os.listdir("/proc/self/fd")))

    def modules(self, _):
        found = {"torch", "numpy", "pydantic"} & set(sys.modules)
        return str(sorted(found))


class Chance(Echo):
    """An environment that does not say that it is deterministic."""

    deterministic = False


class Forgetful(Echo):
    """An environment that is deterministic only in its own words."""

    def draw(self, _):
        return str(time.monotonic_ns())


class Later:
    """An async environment with one event loop for all calls."""

    async def reset(self, row, seed):
        self.loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": "begin"}]

    async def step(self, message):
        await asyncio.sleep(0.01)
        assert asyncio.get_running_loop() is self.loop
        if message["content"] == "raise":
            raise ValueError("no")
        return {"messages": [{"role": "tool", "content": message["content"]}], "reward": 1}

    async def close(self):
        await asyncio.sleep(0)


class Closing(Echo):
    def close(self):
        Path(self.row["file"]).write_text("closed")
        if self.row.get("hangs"):
            time.sleep(600)


class NoStep:
    def reset(self, row, seed):
        return "begin"


class OneArgument(NoStep):
    def reset(self, row):
        return "begin"

    def step(self, message):
        return "go on"


class Needs(Echo):
    def __init__(self, size):
        self.size = size


class Unsure(Echo):
    deterministic = "yes"


def factory():
    return Echo()


def wrong_factory():
    return 3


def raising_factory():
    raise RuntimeError("not today")


def exiting_factory():
    os._exit(4)


game = Echo()
