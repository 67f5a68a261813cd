"""The free-running loop with stand-ins for the actors: who is given which weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from burnish import config
from burnish.actors.supervisor import Call
from burnish.build import build_task, stream_of
from burnish.loops.free import FreeRun

FREE = ["runtime=ray", "loop=free", "loop.max_lag=0", "loop.on_stale=drop"]


def test_a_generator_that_was_idle_is_given_the_new_weights_with_its_next_groups() -> None:
    """A rollout has three groups. The second generator ends its only one, finds none to begin while
    the others wait, and meanwhile the learner publishes version 1."""
    recipe = config.load("sort", [*FREE, "objective.proximal=behavior"])
    learner = SimpleNamespace(version=0)
    supervisor = SimpleNamespace(
        call=lambda name, method, *args, renew=None: Call(name, method, args, renew=renew),
    )
    fleet: Any = SimpleNamespace(
        supervisor=supervisor,
        generators=["generator-0", "generator-1"],
        weights=("version 0", None),
        version=0,
        requests=list,
    )
    prompts = stream_of(recipe, build_task(recipe)[0])
    run = FreeRun(recipe, prompts=prompts, fleet=fleet, learner=learner)
    first, second = run.workers
    run._feed(first)
    run._feed(second)
    assert [len(first.holds), len(second.holds)] == [2, 1]
    second.holds.clear()  # it is graded, and not learned from yet
    second.call, fleet.weights, fleet.version, learner.version = None, ("version 1", None), 1, 1
    run._feed(second)
    assert second.call is None
    run.pace.learn(list(run.pace.loaded))
    run._feed(second)
    assert second.call is not None
    assert second.call.args[0] == "version 1"
    assert set(run.pace.loaded.values()) == {1}
