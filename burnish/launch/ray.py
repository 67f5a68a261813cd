"""A recipe becomes the parts of a run on Ray: generators, a scorer and a learner as actors.

Each actor builds its own part from the recipe, in its own process, with the functions of
``burnish.build``; the driver keeps the task's prompts, the loop and the run directory.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from burnish import build as local
from burnish import engines, folders, preflight, sizes, torchrun
from burnish.actors import cluster
from burnish.actors.cast import Generator, LearnerPart, Scorer
from burnish.actors.fleet import Fleet
from burnish.actors.learner import RemoteLearner
from burnish.actors.supervisor import Supervisor
from burnish.engine.protocol import require
from burnish.loops import asynchronous, free, sync
from burnish.loops.evaluate import Evaluator
from burnish.loops.recorder import Parts
from burnish.models import open_tokenizer
from burnish.progress import tell
from burnish.rollout.branches import branching
from burnish.rollout.filling import replacer_of
from burnish.rollout.length import shaping
from burnish.rollout.rollout import sampling
from burnish.runs.metrics import Timers
from burnish.schema.recipe import Recipe
from burnish.strategy import FreeLoop
from burnish.types import Group


def build(recipe: Recipe) -> Parts:
    """The parts of a run whose generators, scorer and learner are actors of Ray."""
    runtime, note = recipe.runtime, partial(tell, "note")
    folders.remove_dead()
    how, why = cluster.choose(runtime, sizes.device_of(recipe), sizes.shared_memory(recipe))
    tell("load", "reading the prompts")
    task, decode = local.build_task(recipe)
    tell("load", "starting Ray")
    ranks = recipe.mesh.ranks
    leave = cluster.connect(runtime, ranks)
    meeting = torchrun.Meeting(ranks, cluster.own_address(runtime)) if ranks > 1 else None
    place = None if meeting is None else meeting.place
    note(f"the transport of weights is {how!r}, {why}")
    root = folders.SHARED if how == "shared" else Path(tempfile.gettempdir())
    claimed = folders.claim("run", root)
    folder = str(claimed.path)
    names = [f"generator-{number}" for number in range(runtime.generators)]
    group = cluster.Exchange(how, ["learner", *names] if how in cluster.DIRECT else [])
    supervisor = Supervisor(runtime.deadline, note, partial(tell, "actors"), group=group)
    begin, options = supervisor.start, cluster.options
    for name in names:
        begin(name, partial(make_generator, recipe), **options(runtime.generator))
    begin("scorer", partial(make_scorer, recipe), num_cpus=0)
    make = partial(make_learner, recipe, how, folder, place)
    for rank in range(1, ranks):
        follow = partial(make_follower, recipe, rank, place)
        begin(f"rank-{rank}", follow, restarts=False, **options(runtime.learner))
    begin("learner", make, restarts=False, **options(runtime.learner))
    size = recipe.rollout.group_size
    replace = replacer_of(recipe)
    fleet = Fleet(supervisor, names, size=size, params=sampling(recipe), tell=note, replace=replace)
    learner = RemoteLearner(fleet, folder, how)
    stream, buffer = local.stream_of(recipe, task), local.buffer_of(recipe)

    def revive() -> None:
        # Generators that read the dead learner's own memory start again, too.
        others = [] if how in ("shared", "store") else names
        if meeting is not None:
            meeting.renew()
            others = [*others, *(f"rank-{rank}" for rank in range(1, ranks))]
        learner.revive(others)

    def close() -> None:
        task.close()
        supervisor.stop()
        claimed.remove()  # also if it takes too long to leave
        leave()
        claimed.remove()  # an actor may have made a file

    train: Any = partial(asynchronous.train, rollouts=fleet, buffer=buffer)
    if isinstance(recipe.loop, FreeLoop):
        train = partial(free.train, fleet=fleet)
    tell("load", "waiting for the actors to load their parts")
    return Parts(
        recipe=recipe,
        learner=learner,  # type: ignore[arg-type]
        prompts=stream,
        train=partial(train, recipe, prompts=stream, learner=learner),
        validate=partial(Evaluator(recipe, task, fleet, decode).validate, learner.held_out_drift),
        listen=fleet.listen,
        in_flight=fleet.in_flight,
        restore=fleet.restore,
        buffer=buffer,
        publish=learner.publish,
        decode=decode,
        close=close,
        places=supervisor.places,
        beside=fleet.beside,
        shards=None if meeting is None else learner.write,
        revive=revive,
    )


def make_generator(recipe: Recipe) -> Generator:
    recipe = local.prepare(recipe, recipe.runtime.threads)
    engine, loop = local.build_engine(recipe), recipe.loop
    require(engine.capabilities, repeats=not isinstance(loop, FreeLoop))
    drains = isinstance(loop, FreeLoop) and loop.on_update == "wait"
    steps = branching(recipe, lambda: local.decoder(open_tokenizer(recipe)))
    return Generator(engine, drains=drains, tolerance=engines.tolerance(recipe), steps=steps)


def make_scorer(recipe: Recipe) -> Scorer:
    preflight.check(recipe)  # its node may lack a package, a file or the key of a judge
    recipe = local.prepare(recipe, recipe.runtime.threads)  # a learned reward computes, too
    return Scorer(local.build_task(recipe)[0], shaping(recipe))


def make_follower(recipe: Recipe, rank: int, place: dict[str, str] | None) -> None:
    """Learns with the learner's actor until it ends."""
    os.environ |= {**(place or {}), "RANK": str(rank)}
    torchrun.follow(recipe, recipe.runtime.threads)


def make_learner(
    recipe: Recipe, how: str, folder: str, place: dict[str, str] | None = None
) -> LearnerPart:
    """``place`` is where ranks meet that learn together; None if this actor learns alone."""
    recipe = local.prepare(recipe, recipe.runtime.threads)
    own: Any = None
    if place is not None:
        os.environ |= {**place, "RANK": "0"}
        own = torchrun.conduct(recipe)

    def learn(learner: Any, number: int, groups: list[Group]) -> sync.Step:
        return sync.learn(recipe, learner, number, groups, Timers())

    return LearnerPart(own or local.build_learner(recipe), learn, how, folder)
