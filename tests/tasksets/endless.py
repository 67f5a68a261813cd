"""A taskset without an end, whose harness is not made for this machine."""

from itertools import count

import letters
import verifiers.v1 as vf


class Endless(vf.Taskset[letters.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in count():
            yield letters.Task(letters.Letter(prompt=f"Write {number}.", letter="0"))


class Talk(letters.Talk):
    pass


__all__ = ["Endless", "Talk"]
