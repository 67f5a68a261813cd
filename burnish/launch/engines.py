"""The engine of a recipe, if it is in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from burnish import machine, preflight
from burnish.engine import remote
from burnish.engine.environment import TOKEN, key_of
from burnish.engine.protocol import Engine, Sleeper
from burnish.engine.serving import Settings, fingerprint
from burnish.engine.sglang import SglangEngine
from burnish.errors import EngineError
from burnish.model import hub
from burnish.model.tokenizer import Tokenizer
from burnish.models import DTYPES, open_model
from burnish.progress import tell
from burnish.schema.models import LanguageConfig
from burnish.schema.recipe import Recipe
from burnish.sizes import device_of

Apart = remote.RemoteEngine | SglangEngine
ROUGH = 1.0
"""How far log-probabilities of a probe may differ if not everything is computed in fp32. In bf16,
logits of unlikely tokens are rounded to 1/16 or 1/8; vLLM and SGLang were seen to be 0.3 away."""


def open_engine(recipe: Recipe) -> Engine:
    """Starts the engine of a recipe, or reaches the one that its url names."""
    own, directory = recipe.engine, directory_of(recipe)
    tell("load", f"waiting for the engine {own.url or own.name}")
    if own.url is None:
        settings = settings_of(recipe, directory)
        return remote.start(settings, python=own.python or sys.executable, deadline=own.deadline)
    wanted = {"name": own.name, "precision": own.precision, "model": fingerprint(directory)}
    engine: Apart
    if own.name == "sglang":
        engine = SglangEngine(
            own.url,
            directory,
            Tokenizer.load(directory),
            deadline=own.deadline,
            max_running=own.max_running,
            keeps_cache=recipe.loop.on_update == "keep",
            weights=own.weights,
            sleeps=own.sleep,
            key=key_of(recipe),
        )
        del wanted["model"]  # it has loaded the directory's
    else:
        engine = remote.connect(own.url, os.environ[TOKEN], deadline=own.deadline)
        if recipe.loop.on_update != "wait":  # else no weights come while samples are in flight
            wanted["on_update"] = recipe.loop.on_update
    for key, value in wanted.items():
        if engine.facts[key] != value:
            engine.close()
            raise EngineError(
                f"the engine at {own.url} has {key} = '{engine.facts[key]}', and this run needs "
                f"'{value}' (of {directory}); serve the same there, or change the recipe"
            )
    return engine


def tolerance(recipe: Recipe) -> float:
    """How far log-probabilities of a probe may differ between sampler and learner."""
    is_exact = recipe.engine.precision == recipe.train.precision == "fp32"
    return 1e-4 if is_exact else ROUGH


def attach(recipe: Recipe, engine: Engine, policy: Any) -> Callable[[], None]:
    """Holds an engine in another process to the learner's policy after each load -> a function that
    ends the process, or leaves the server."""
    if not isinstance(engine, Apart):
        return lambda: None
    engine.expect(policy.probe, tolerance(recipe))
    return engine.close


def leave(engine: Engine) -> None:
    """Ends the process of an engine, or leaves its server; one in this process has nothing to
    end."""
    if isinstance(engine, Apart):
        engine.close()


def rest(recipe: Recipe, engine: Engine) -> Callable[[], AbstractContextManager[None]]:
    """A function whose context gives the engine's GPU memory to the learner, if the recipe says
    so; the engine wakes when it is next asked."""
    if not recipe.engine.sleep:
        return nullcontext
    assert isinstance(engine, Sleeper)
    return partial(_asleep, engine)


@contextmanager
def _asleep(engine: Sleeper) -> Iterator[None]:
    engine.sleep()
    yield
    torch.cuda.empty_cache()  # memory that the learner's torch has kept goes to the engine


def settings_of(recipe: Recipe, directory: Path) -> Settings:
    """How an engine's process is to make the engine of a settled recipe."""
    own = recipe.engine
    return Settings(
        name=own.name,
        model=str(directory.absolute()),
        precision=own.precision,
        device=device_of(recipe),
        kv_mb=own.kv_mb,
        max_running=own.max_running,
        on_update="keep" if recipe.loop.on_update == "keep" else "recompute",
        threads=recipe.runtime.threads or machine.cores(),
        fp32_head=getattr(recipe.model, "fp32_head", False),
        sleep=own.sleep,
    )


def directory_of(recipe: Recipe) -> Path:
    """A directory that holds the recipe's model; a model that has none yet is written to the
    cache."""
    kind = recipe.model
    is_whole = isinstance(kind, LanguageConfig) and kind.adapter is None
    if is_whole and preflight.run_of(recipe) is None:
        return hub.resolve(recipe.source)
    opened = open_model(recipe, DTYPES[recipe.engine.precision])
    return Path(hub.as_setting((opened.model, opened.tokenizer)))
