"""A taskset whose tasks fail in different ways, by their number."""

import asyncio

import letters
import verifiers.v1 as vf

NAMES = ("raises", "late", "not_a_number", "none", "model", "setup", "good")


class Fault(vf.TaskData):
    fault: str


class Task(vf.Task[Fault, vf.State]):
    async def setup(self, trace, runtime):
        if self.data.fault == "setup":
            raise RuntimeError("no disk")

    async def score(self, trace, runtime=None):
        if self.data.fault != "none":
            await super().score(trace, runtime)

    @vf.reward
    async def points(self, task: Fault) -> float:
        if task.fault == "raises":
            raise KeyError("gold")
        if task.fault == "late":
            await asyncio.sleep(60)
        return float("nan") if task.fault == "not_a_number" else 0.5


class Faults(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for name in NAMES:
            yield Task(Fault(prompt=f"fault: {name}", fault=name), self.config.task)


class Talk(letters.Talk):
    pass


__all__ = ["Faults", "Talk"]
