"""Builds the engine of a recipe: in this process, in a child process, or behind a server.

``build_engine`` is the only function that chooses between them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from burnish.console.progress import tell
from burnish.engine.build import LoadedModel, make_engine
from burnish.engine.protocol import Engine, ExternalEngine, Sleeper
from burnish.engine.remote import client
from burnish.engine.remote.environment import TOKEN, read_key
from burnish.engine.remote.server import fingerprint
from burnish.engine.remote.sglang import SglangEngine
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.launch.memory import compare_needs
from burnish.launch.models import DTYPES, ModelSource, open_model
from burnish.launch.preflight import raise_problems
from burnish.launch.resolve import Resolved
from burnish.machine import hardware
from burnish.model import hub
from burnish.model.sorter import Sorter
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.costs import PAGE, Need
from burnish.recipe.engine import AnyEngine, SglangConfig
from burnish.recipe.models import AnyModel, SorterConfig
from burnish.recipe.tasks import SortTask
from burnish.rollout.agents import AgentEngine
from burnish.rollout.episodes import EpisodeEngine

ROUGH = 1.0
"""Largest accepted difference between the probes of engine and learner, in nats, unless both
compute in fp32. In bf16, logits of unlikely tokens are rounded to multiples of 1/16 or 1/8;
differences of 0.3 were measured with vLLM and SGLang."""


def build_engine(resolved: Resolved) -> Engine:
    """Return the engine of a recipe, with the model loaded: build it in this process, start it in a
    child process, or connect to the server at engine.url. `leave` closes it.

    Raise a RunError if the cache of an engine in this process would not fit into memory, and an
    EngineError if the server runs another engine, precision or model than the recipe requires."""
    recipe, own = resolved.recipe, resolved.recipe.engine
    if isinstance(recipe.task, SortTask):
        sorter = make_sorter(recipe.task, recipe.model, recipe.seed)
        return make_engine(EngineSettings("sorter"), LoadedModel(sorter))
    if own.is_apart:
        directory = directory_of(resolved.source, own.precision)
        tell("load", f"waiting for the engine {own.url or own.name}")
        if own.url is not None:
            return _connect(own, directory, resolved.source.tokenizer, recipe.loop.on_update)
        settings, python = settings_of(resolved, directory), own.python or sys.executable
        return client.start_engine(settings, python=python, deadline=own.deadline)
    settings = settings_of(resolved)
    total, free = hardware.memory(settings.device)
    cache = Need("cache", f"engine.kv_mb = {own.kv_mb}", settings.kv_bytes)
    room = {"cache": total if settings.device == "cpu" else free}
    raise_problems(compare_needs([cache], room))
    model = open_model(resolved.source, DTYPES[own.precision])
    return make_engine(settings, LoadedModel(model, resolved.source.tokenizer))


def make_sorter(task: SortTask, model: AnyModel, seed: int) -> Sorter:
    """Return a new sorting model for a task."""
    assert isinstance(model, SorterConfig)
    return Sorter(task.numbers, task.length, model.width, seed=seed)


def _connect(own: AnyEngine, directory: Path, tokenizer: Tokenizer, on_update: str) -> Engine:
    """Connect to the server at engine.url and return its engine. Raise an EngineError if the server
    runs another engine, precision or model than the recipe requires."""
    assert own.url is not None
    wanted = {"name": own.name, "precision": own.precision, "model": fingerprint(directory)}
    engine: client.RemoteEngine | SglangEngine
    if isinstance(own, SglangConfig):
        engine = SglangEngine(
            own.url,
            directory,
            tokenizer,
            deadline=own.deadline,
            max_running=own.max_running,
            keeps_cache=on_update == "keep",
            weights=own.weights,
            sleeps=own.sleep,
            key=read_key(own.key, own.url),
        )
        del wanted["model"]  # the engine has loaded the directory's weights
    else:
        engine = client.connect_engine(own.url, os.environ[TOKEN], deadline=own.deadline)
        if on_update != "wait":  # otherwise no samples are in flight during a load
            wanted["on_update"] = on_update
    for key, value in wanted.items():
        if engine.facts[key] != value:
            engine.close()
            raise EngineError(
                f"the engine at {own.url} has {key} = '{engine.facts[key]}', and this run needs "
                f"'{value}' (of {directory}); serve that engine and model, or change the recipe"
            )
    return engine


def tolerance(engine_precision: str, train_precision: str) -> float:
    """Return the largest accepted difference, in nats, between the engine's and the learner's
    log-probabilities of the probe (fixed tokens): 1e-4 if both compute in fp32, else `ROUGH`."""
    is_exact = engine_precision == train_precision == "fp32"
    return 1e-4 if is_exact else ROUGH


def inner_engine(engine: Engine) -> Engine:
    """Return the engine that samples: the one inside an engine of episodes, or the engine
    itself."""
    return engine.engine if isinstance(engine, EpisodeEngine | AgentEngine) else engine


def attach(
    engine: Engine, probe: Callable[[], tuple[float, ...]], bound: float
) -> Callable[[], None]:
    """Make an external engine compare its probe with the learner's ``probe`` after each load of
    weights, and raise an error if they differ by more than ``bound`` nats.

    Return a function that ends the engine's process or disconnects from its server. For an engine
    in this process, nothing is checked, and the function does nothing.
    """
    engine = inner_engine(engine)
    if not isinstance(engine, ExternalEngine):
        return lambda: None
    engine.expect(probe, bound)
    return engine.close


def leave(engine: Engine) -> None:
    """Close an external engine. An engine in this process needs no closing."""
    engine = inner_engine(engine)
    if isinstance(engine, ExternalEngine):
        engine.close()


def rest(engine: Engine, *, sleeps: bool) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that creates a context for the learner's work. If ``sleeps``, the engine
    releases its GPU memory when the context is entered, and wakes at its next call after the
    context; otherwise the context does nothing.
    """
    if not sleeps:
        return nullcontext
    sleeper = inner_engine(engine)
    assert isinstance(sleeper, Sleeper)
    return partial(_asleep, sleeper)


@contextmanager
def _asleep(engine: Sleeper) -> Iterator[None]:
    engine.sleep()
    yield
    torch.cuda.empty_cache()  # release memory that torch has cached, so that the engine can use it


def settings_of(resolved: Resolved, directory: Path | None = None) -> EngineSettings:
    """Return the settings from which an engine is built.

    ``directory`` contains the model's files; None if the model is passed in memory.
    """
    recipe, own = resolved.recipe, resolved.recipe.engine
    return EngineSettings(
        name=own.name,
        model=None if directory is None else str(directory.absolute()),
        precision=own.precision,
        device=resolved.device,
        kv_bytes=own.kv_mb * 2**20,
        page_size=PAGE,
        max_running=own.max_running,
        on_update="keep" if recipe.loop.on_update == "keep" else "recompute",
        threads=recipe.runtime.threads or hardware.cores(),
        fp32_head=recipe.model.fp32_head,
        sleep=own.sleep,
    )


def directory_of(source: ModelSource, precision: str) -> Path:
    """Return a directory with the model in Hugging Face's layout, for an engine in another process.

    If the model has no such directory (a run, random weights, or a model with an adapter), it is
    first loaded and written to burnish's cache, in ``precision``: fp32, bf16 or fp16.
    """
    if source.run is None and source.seed is None and source.adapter is None:
        return source.files
    model = open_model(source, DTYPES[precision])
    return Path(hub.as_setting((model, source.tokenizer)))
