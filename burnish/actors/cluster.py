"""Ray itself: a cluster of one's own on this machine, or one that is joined."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import ray

from burnish.errors import ConfigError
from burnish.strategy import Resources, RuntimeConfig

TRANSPORTS = {"shared": "shared memory", "store": "Ray's object store"}


def connect(runtime: RuntimeConfig) -> Callable[[], None]:
    """Starts Ray on this machine, or joins the cluster at the recipe's address.

    Returns the function that leaves it; a script's own Ray stays as it is.

    A run whose actors do not fit is refused at once: Ray would wait for ever.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # as a run in one process
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # busy cores start it slowly
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    leave: Callable[[], None] = ray.shutdown
    if ray.is_initialized():
        leave = _stay
    elif runtime.address is None:
        ray.init(include_dashboard=False, **quiet)
    else:
        try:
            ray.init(address=runtime.address, **quiet)
        except ConnectionError as error:
            raise ConfigError(
                f"runtime.address = {runtime.address!r}: no Ray cluster answers there ({error}); "
                "start one with `ray start --head`, or leave the address out"
            ) from None
    problem = lacking(runtime, ray.cluster_resources())  # type: ignore[no-untyped-call]
    if problem is not None:
        leave()
        raise ConfigError(problem)
    return leave


def _stay() -> None:
    """Leaves Ray as it is."""


def options(resources: Resources) -> dict[str, Any]:
    return {"num_cpus": resources.cpus, "num_gpus": resources.gpus}


def lacking(runtime: RuntimeConfig, there: dict[str, float]) -> str | None:
    """The arithmetic of actors that do not fit; None if they do."""
    for unit, name in (("cpus", "CPU"), ("gpus", "GPU")):
        each, own = getattr(runtime.generator, unit), getattr(runtime.learner, unit)
        wanted, found = runtime.generators * each + own, there.get(name, 0.0)
        if wanted > found:
            return (
                f"the actors need {wanted:g} {unit} ({runtime.generators} generators × {each:g} + "
                f"the learner's {own:g}), and Ray has {found:g}; use fewer generators, or set "
                f"runtime.generator.{unit} and runtime.learner.{unit}"
            )
    return None
