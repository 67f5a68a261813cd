"""Resolves a recipe once: finds its device, precision, models and sizes on this machine.

`resolve` loads torch only after the checks of `burnish/launch/preflight.py` have passed. All code
that builds or describes a run starts from the resulting `Resolved`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.console.progress import tell
from burnish.errors import BurnishError, ModelError
from burnish.launch.preflight import check_chat, find_problems, problem_of, raise_problems
from burnish.machine import hardware
from burnish.recipe.costs import Room, Size, needs, prompt_room
from burnish.recipe.models import AnyModel, LanguageConfig
from burnish.recipe.recipe import Recipe, TrainConfig

if TYPE_CHECKING:
    from burnish.launch.models import ModelSource


@dataclass(frozen=True)
class Resolved:
    """A recipe with the device, precision, models and sizes with which it runs on this machine."""

    recipe: Recipe
    """The recipe, with each precision "auto" replaced by the actual precision."""
    device: str
    """"cpu", "cuda" or "cuda:N"; always "cpu" for the sorting model."""
    model: ModelSource | None = None
    """The language model; None for the sorting model, or if the files are not on this machine."""
    frozen: dict[str, ModelSource] = field(default_factory=dict)
    """The teacher and the reward model, by the setting that names them."""
    size: Size | None = None
    """Size of the model; None if ``model`` is None."""
    room: Room | None = None
    """The longest prompt that fits; None if nothing is sampled, or if ``model`` is None."""
    problems: tuple[BurnishError, ...] = ()
    """Reasons why the recipe can't run here; always empty in the result of `resolve`."""

    @property
    def source(self) -> ModelSource:
        """The language model of a recipe that `resolve` has returned."""
        assert self.model is not None, "resolve has downloaded the model"
        return self.model


def resolve(
    recipe: Recipe,
    out: Path | None = None,
    *,
    is_new: bool = True,
    checks: bool = True,
    threads: int | None = None,
) -> Resolved:
    """Resolve a recipe that is about to run: check it, raise its problems as an error, load and
    configure torch, download missing models, and return the recipe with its device, precision,
    models and sizes.

    ``out`` is the run's directory, for which memory and disk are checked; None if no run is
    written. ``is_new`` is False if the run is resumed. ``checks`` is False for an actor that builds
    one component, because its machine need not have the inputs of the other components.
    ``threads`` is the number of torch's threads; None for one per core.
    """
    if checks:
        raise_problems(find_problems(recipe, out if is_new else None))
    tell("load", "loading torch")
    hardware.set_up_torch(threads or hardware.cores())
    import torch

    from burnish.launch import memory
    from burnish.launch.models import find_device, with_own_precision

    memory.check_device(recipe.device, sleep=recipe.engine.sleep)
    recipe = with_own_precision(recipe)
    train, engine = recipe.train, recipe.engine
    device = find_device(recipe.device) if recipe.model.is_language else "cpu"
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # for what is not told the device, such as Triton's kernels
    if checks and out is not None and recipe.runtime.name != "ray":
        memory.check_offload(train, device)
    _warn_of_slow_precision({engine.precision, train.precision}, device)
    model, frozen = _find_models(recipe.model, recipe.frozen_models, recipe.seed, fetch=True)
    if model is None:
        return Resolved(recipe, device)
    if checks:
        raise_problems(problem_of(check_chat, recipe.tasks, recipe.model))  # it was downloaded
        raise_problems(_model_problems(model, frozen, train, recipe.mesh.tensor))
    size = memory.measure_model(model, frozen, train, engine.precision, device)
    if checks and out is not None:
        needed = needs(recipe, size)
        raise_problems(memory.missing_room(needed, device, out, ranks=recipe.ranks))
        memory.warn_of_activations(needed, device)
    room = None
    if not recipe.is_supervised:
        room = prompt_room(size, engine, recipe.rollout, recipe.validation, train.micro_tokens)
    return Resolved(recipe, device, model, frozen, size, room)


def survey(recipe: Recipe, out: Path) -> Resolved:
    """Resolve a recipe as far as possible without downloads, for `burnish plan` and `burnish
    doctor`. The problems that would stop a run in the directory ``out`` are returned in
    ``problems`` instead of being raised; ``model`` and ``size`` are None if the model is not on
    this machine."""
    from burnish.launch import memory
    from burnish.launch.models import find_device, with_own_precision

    unknown = problem_of(partial(memory.check_device, sleep=recipe.engine.sleep), recipe.device)
    problems = [*find_problems(recipe, out), *unknown]
    if unknown:
        recipe = recipe.model_copy(update={"device": "auto"})
    recipe = with_own_precision(recipe)
    train, engine = recipe.train, recipe.engine
    device = find_device(recipe.device) if recipe.model.is_language else "cpu"
    if recipe.runtime.name != "ray":
        problems += problem_of(memory.check_offload, train, device)
    if any(isinstance(problem, ModelError) for problem in problems):
        return Resolved(recipe, device, problems=tuple(problems))
    model, frozen = _find_models(recipe.model, recipe.frozen_models, recipe.seed, fetch=False)
    if model is None:
        return Resolved(recipe, device, None, frozen, problems=tuple(problems))
    problems += _model_problems(model, frozen, train, recipe.mesh.tensor)
    size, room = memory.measure_model(model, frozen, train, engine.precision, device), None
    problems += memory.missing_room(needs(recipe, size), device, out, ranks=recipe.ranks)
    if not recipe.is_supervised:
        try:
            room = prompt_room(size, engine, recipe.rollout, recipe.validation, train.micro_tokens)
        except BurnishError as error:
            problems.append(error)
    return Resolved(recipe, device, model, frozen, size, room, tuple(problems))


Sources = dict[str, "ModelSource"]


def _find_models(
    policy: AnyModel, others: Mapping[str, LanguageConfig], seed: int, *, fetch: bool
) -> tuple[ModelSource | None, Sources]:
    """Return the sources of the policy's language model (None for the sorting model) and of the
    frozen models, by setting. Missing files are downloaded.

    Without ``fetch``, nothing is downloaded, and models that are not on this machine are left out.
    """
    from burnish.launch.models import find_model

    if not policy.is_language:
        return None, {}
    found = {setting: find_model(m, seed, fetch=fetch) for setting, m in others.items()}
    frozen = {setting: source for setting, source in found.items() if source is not None}
    return find_model(policy, seed, fetch=fetch), frozen


def _model_problems(
    model: ModelSource, frozen: Sources, train: TrainConfig, tensor_ranks: int
) -> list[BurnishError]:
    from burnish.launch import memory

    found = problem_of(memory.check_vocabulary, model, frozen)
    found += problem_of(memory.check_adapter_shape, model, train)
    return found + problem_of(memory.check_heads, tensor_ranks, model, frozen.get("teacher.model"))


def _warn_of_slow_precision(precisions: set[str], device: str) -> None:
    from burnish.launch.models import DTYPES
    from burnish.model import matmul

    for precision in precisions - {"fp32"}:
        if not hardware.supports_precision(precision, device):
            factor = matmul.cost(DTYPES[precision])
            tell(
                "note",
                f"note: this processor has no {precision} products, so one takes {factor:.1f} "
                "times as long as in fp32; precision = 'auto' selects fp32 here",
            )
