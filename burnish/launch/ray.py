"""Builds the components of a run on Ray: generators, a scorer and a learner as actors.

Each actor resolves the recipe on its own machine and builds its component there, with the functions
of `burnish/launch/local.py`. The driver has the prompt stream, the loop and the run directory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from burnish.actors import cluster
from burnish.actors.remote_learner import RemoteLearner
from burnish.actors.rollouts import RemoteRollouts
from burnish.actors.supervisor import Supervisor
from burnish.actors.workers import GeneratorWorker, LearnerWorker, ScorerWorker
from burnish.console.progress import tell
from burnish.engine.protocol import require
from burnish.launch import engines, local, torchrun
from burnish.launch.resolve import Resolved, resolve
from burnish.launch.settings import (
    make_evaluator,
    rollout_settings,
    run_settings,
    step_settings,
)
from burnish.learner.protocol import Learner, Step
from burnish.loops import free, lagged, sync
from burnish.loops.recorder import RunComponents
from burnish.machine import folders
from burnish.recipe.costs import shared_memory
from burnish.recipe.recipe import Recipe
from burnish.recipe.runtime import FreeLoop, RayRuntime
from burnish.recipe.tasks import AgentTask, EnvironmentTask, VerifiersTask
from burnish.rollout.dead_groups import make_replacer
from burnish.rollout.step_values import make_step_sampler
from burnish.runs.metrics import Timers
from burnish.tasks.agent import open_agents
from burnish.tasks.environment import start_environments
from burnish.tasks.taskset import open_taskset
from burnish.types import Group


def build_on_ray(resolved: Resolved) -> RunComponents:
    """Start Ray, or join the recipe's cluster, start the actors of generators, scorer and learner
    (with a mesh, one actor per rank), and return the components of the run. The actors load their
    models in the meantime. The components' ``close`` ends the actors and the use of Ray."""
    recipe, note = resolved.recipe, partial(tell, "note")
    runtime = recipe.runtime
    assert isinstance(runtime, RayRuntime)
    folders.remove_dead()
    how, why = cluster.choose_transport(
        runtime, resolved.device, shared_memory(recipe, resolved.size)
    )
    tell("load", "reading the prompts")
    task, decode = local.build_task(resolved)
    tell("load", "starting Ray")
    ranks = recipe.mesh.ranks
    leave = cluster.start_or_join(runtime, ranks)
    meeting = torchrun.Meeting(ranks, cluster.driver_address(runtime)) if ranks > 1 else None
    place = None if meeting is None else meeting.place
    note(f"the transport of weights is {how!r}, {why}")
    root = folders.SHARED if how == "shared" else Path(tempfile.gettempdir())
    claimed = folders.claim("run", root)
    folder = str(claimed.path)
    names = [f"generator-{number}" for number in range(runtime.generators)]
    group = cluster.TransportGroup(
        how, ["learner", *names] if how in cluster.DIRECT_TRANSPORTS else []
    )
    supervisor = Supervisor(runtime.deadline, note, partial(tell, "actors"), group=group)
    begin, options = supervisor.start, cluster.actor_options
    for name in names:
        begin(name, partial(make_generator, recipe), **options(runtime.generator))
    begin("scorer", partial(make_scorer, recipe), num_cpus=0)
    make = partial(make_learner, recipe, how, folder, place)
    for rank in range(1, ranks):
        follow = partial(make_follower, recipe, rank, place)
        begin(f"rank-{rank}", follow, restarts=False, **options(runtime.learner))
    begin("learner", make, restarts=False, **options(runtime.learner))
    settings, total, loop = rollout_settings(recipe), recipe.train.steps, recipe.loop
    is_free = isinstance(loop, FreeLoop)
    rollouts = RemoteRollouts(
        supervisor,
        names,
        size=settings.group_size,
        params=settings.params,
        log=note,
        replace=None if is_free else make_replacer(settings),
    )
    learner = RemoteLearner(rollouts, folder, how)
    stream = local.build_stream(resolved, task)
    buffer = local.build_buffer(recipe.buffer, recipe.seed)

    def revive() -> None:
        # Generators whose transport reads the dead learner's own memory are restarted, too.
        others = [] if how in ("shared", "store") else names
        if meeting is not None:
            meeting.renew()
            others = [*others, *(f"rank-{rank}" for rank in range(1, ranks))]
        learner.revive(others)

    def close() -> None:
        task.close()
        supervisor.stop()
        claimed.remove()  # before leaving, which may take too long
        leave()
        claimed.remove()  # an actor may have written a file in the meantime

    train: Callable[..., Iterator[Step]]
    if isinstance(loop, FreeLoop):
        steps = recipe.gradient_steps_per_rollout
        train = partial(
            free.train_free, settings, total, loop=loop, gradient_steps=steps, rollouts=rollouts
        )
    else:
        train = partial(
            lagged.train_lagged, settings, total, lag=loop.lag, rollouts=rollouts, buffer=buffer
        )
    evaluator = make_evaluator(recipe, task, rollouts, decode)
    tell("load", "waiting for the actors to load their parts")
    return RunComponents(
        settings=run_settings(recipe),
        learner=learner,
        prompts=stream,
        train=partial(train, prompts=stream, learner=learner),
        validate=partial(evaluator.validate, learner.held_out_drift),
        listen=rollouts.listen,
        in_flight=rollouts.in_flight,
        restore=rollouts.restore,
        buffer=buffer,
        publish=learner.publish,
        decode=decode,
        close=close,
        places=supervisor.places,
        in_background=rollouts.run_in_background,
        shards=None if meeting is None else learner.write_shards,
        revive=revive,
    )


def make_generator(recipe: Recipe) -> GeneratorWorker:
    """Build the generator of a run, with its engine, in the generator's actor. The environments of
    its episodes are child processes of the actor."""
    resolved = resolve(recipe, checks=False, threads=recipe.runtime.threads)
    recipe, loop, engine = resolved.recipe, recipe.loop, engines.build_engine(resolved)
    require(engine.capabilities, repeats=not isinstance(loop, FreeLoop))
    if isinstance(recipe.task, EnvironmentTask):
        environments = start_environments(recipe.task, resolved.source.tokenizer)
        engine = local.with_environments(
            resolved.source,
            engine,
            recipe.task,
            environments,
            history=recipe.rollout.history,
            total=recipe.train.micro_tokens,
        )
    if isinstance(recipe.task, AgentTask | VerifiersTask):
        config = recipe.task
        agents = open_agents(config) if isinstance(config, AgentTask) else open_taskset(config)
        engine = local.with_agents(
            resolved.source,
            engine,
            config,
            agents.start(),
            history=recipe.rollout.history,
            total=recipe.train.micro_tokens,
        )
    drains = isinstance(loop, FreeLoop) and loop.on_update == "wait"
    steps = make_step_sampler(
        recipe.objective.advantage,
        recipe.rollout.group_size,
        lambda: local.decoder(resolved.source.tokenizer),
    )
    bound = engines.tolerance(recipe.engine.precision, recipe.train.precision)
    return GeneratorWorker(engine, drains=drains, tolerance=bound, steps=steps)


def make_scorer(recipe: Recipe) -> ScorerWorker:
    """Build the scorer of a run, with its task, in the scorer's actor."""
    # With all checks: the actor's machine may lack a package, a file or a judge's API key.
    resolved = resolve(recipe, threads=recipe.runtime.threads)
    return ScorerWorker(local.build_task(resolved)[0], rollout_settings(recipe).penalize)


def make_follower(recipe: Recipe, rank: int, place: dict[str, str] | None) -> None:
    """Run a rank other than rank 0 of a mesh in this actor: build its part of the learner and run
    the calls of rank 0, which is the learner's actor, until rank 0 closes the learner. ``place``
    has the environment variables of the rendezvous."""
    os.environ |= {**(place or {}), "RANK": str(rank)}
    torchrun.follow(recipe, recipe.runtime.threads)


def make_learner(
    recipe: Recipe, how: str, folder: str, place: dict[str, str] | None = None
) -> LearnerWorker:
    """Build the learner of a run in the learner's actor; with a mesh, this actor is rank 0.

    ``how`` is the transport of weights, which may write files in ``folder``. ``place`` has the
    environment variables with which the ranks of a mesh find each other; None if this actor learns
    alone.
    """
    resolved = resolve(recipe, checks=False, threads=recipe.runtime.threads)
    training = step_settings(resolved.recipe)

    def train_step(learner: Learner, number: int, groups: list[Group]) -> Step:
        return sync.train_step(training, learner, number, groups, Timers())

    if place is None:
        return LearnerWorker(local.build_learner(resolved), train_step, how, folder)
    os.environ |= {**place, "RANK": "0"}
    mesh = torchrun.conduct(resolved)
    return LearnerWorker(mesh, train_step, how, folder, mesh.write_shards)
