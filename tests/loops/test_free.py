"""The free-running loop with stand-ins for the actors: who is given which weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
from burnish.actors.supervisor import Call
from burnish.launch.local import build_stream, build_task
from burnish.launch.resolve import resolve
from burnish.launch.settings import rollout_settings
from burnish.loops.free import FreeRun
from burnish.recipe.load import load_recipe

FREE = ["runtime=ray", "loop=free", "loop.max_lag=0", "loop.on_stale=drop"]


def begun(life: dict[str, int]) -> tuple[FreeRun, Any, Any]:
    """A free run of two generators, the learner's stand-in and the rollouts'. ``life`` numbers the
    process of each generator."""
    recipe = load_recipe("sort", [*FREE, "objective.proximal=behavior"])
    learner = SimpleNamespace(version=0)
    supervisor = SimpleNamespace(
        process_number=life.__getitem__,
        call=lambda name, method, *args, retry_args=None: Call(
            name, method, args, retry_args=retry_args
        ),
    )
    rollouts: Any = SimpleNamespace(
        supervisor=supervisor,
        generators=["generator-0", "generator-1"],
        weights=("version 0", None),
        version=0,
        requests=list,
    )
    resolved = resolve(recipe)
    prompts = build_stream(resolved, build_task(resolved)[0])
    return (
        FreeRun(
            rollout_settings(recipe),
            recipe.loop,
            recipe.gradient_steps_per_rollout,
            prompts=prompts,
            rollouts=rollouts,
            learner=learner,
        ),
        learner,
        rollouts,
    )


def test_a_generator_that_was_idle_is_given_the_new_weights_with_its_next_groups() -> None:
    """A rollout has three groups. The second generator ends its only one, finds none to begin while
    the others wait, and meanwhile the learner publishes version 1."""
    run, learner, rollouts = begun({"generator-0": 1, "generator-1": 1})
    first, second = run.workers
    run._feed(first)
    run._feed(second)
    assert [len(first.holds), len(second.holds)] == [2, 1]
    second.holds.clear()  # it is graded, and not learned from yet
    second.call, rollouts.weights = None, ("version 1", None)
    rollouts.version = learner.version = 1
    run._feed(second)
    assert second.call is None
    run.pace.learn(list(run.pace.loaded))
    run._feed(second)
    assert second.call is not None
    assert second.call.args[0] == "version 1"
    assert set(run.pace.loaded.values()) == {1}


def test_a_generator_that_died_during_an_evaluation_is_given_all_its_groups_again() -> None:
    """The evaluation's call starts it again while the loop has none of its own."""
    life = {"generator-0": 1, "generator-1": 1}
    run, _, _ = begun(life)
    first, _ = run.workers
    run._feed(first)
    held = list(first.holds)
    assert len(held) == 2
    first.call, life["generator-0"] = None, 2
    run._feed(first)
    assert first.call is not None
    assert first.call.args[0] == "version 0"
    assert [number for number, _ in first.call.args[2]] == held
    run._feed(first)
    assert first.call.args[2] == [], "it has them now"
