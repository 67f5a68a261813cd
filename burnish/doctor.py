"""What this machine is, what is installed on it, and what each recipe would take here."""

from __future__ import annotations

import shutil
from pathlib import Path

from burnish import build, config, estimate, machine, preflight
from burnish.config import Recipe
from burnish.machine import Machine, Rates
from burnish.plan import Lines, Section, Size, spell

SECONDS = 0.4
"""How long each precision is measured."""


def examine(runs: Path = Path("runs")) -> list[Section]:
    """Sections of (what, how it is), made in a few seconds; ``runs`` is where runs would go."""
    found = machine.describe()
    rates = {name: machine.measure(SECONDS, precision=name) for name in ("fp32", "bf16")}
    room = next(p for p in (runs.absolute(), *runs.absolute().parents) if p.is_dir())
    disk = f"{spell(shutil.disk_usage(room).free)} free in {room}"
    return [
        ("machine", [*_machine(found), *_rates(rates), ("disk", disk)]),
        ("optional parts", [_extra(name) for name in preflight.EXTRAS]),
        ("recipes", [(name, _recipe(name, runs, rates)) for name in config.list_recipes()]),
    ]


def size_of(recipe: Recipe) -> Size | None:
    """The size of the recipe's model, or of the model that its missing first run begins with; None
    if that is not here either."""
    first = preflight.first_run(recipe.model.name)
    if first is not None and not Path(recipe.model.name).exists():
        recipe = recipe.model_copy(update={"model": first.model})
    if preflight.missing_model(recipe):
        return None
    return build.measure(recipe)


def _machine(found: Machine) -> Lines:
    known = ", ".join(found.instructions) or "not told by this system"
    bf16 = (
        "bf16 in hardware" if found.has_bf16 else "no bf16 in hardware: fp32 is as fast or faster"
    )
    gpu = "none that torch finds"
    if found.gpu is not None:
        gpu = f"{found.gpu}, {spell(found.gpu_available)} of {spell(found.gpu_memory)} free"
    return [
        ("processor", found.processor),
        ("cores", f"{found.cores} for this process"),
        ("instructions", f"{known} ({bf16})"),
        ("memory", f"{spell(found.available)} of {spell(found.memory)} free"),
        ("GPU", gpu),
    ]


def _rates(rates: dict[str, Rates]) -> Lines:
    return [
        (
            f"{name} products",
            f"{rate.decode_gflops:,.0f} GFLOP/s while sampling, {rate.learn_gflops:,.0f} while "
            f"learning{'' if rate.precision == name else ' (computed in fp32)'}",
        )
        for name, rate in rates.items()
    ]


def _extra(name: str) -> tuple[str, str]:
    extra = preflight.EXTRAS[name]
    if preflight.is_installed(*extra.modules):
        return name, f"installed: {extra.purpose}"
    return name, f"pip install 'burnish[{name}]': {extra.purpose}"


def _recipe(name: str, runs: Path, rates: dict[str, Rates]) -> str:
    """About how long the recipe takes here, and a line for each thing that it lacks."""
    recipe = build.settled(config.load(name))
    path, size = runs / name, size_of(recipe)
    rate = rates.get(recipe.train.precision, rates["fp32"])
    lacks = [*preflight.problems(recipe), *build.lacking_room(recipe, path, size)]
    duration = estimate.seconds(recipe, size, rate)
    time = estimate.spoken(duration) if duration else "time not known before its rows are here"
    if size is None and duration is None:
        time = "time not known before its model is here"
    return "\n".join([f"{time}{'' if lacks else ', ready'}", *(f"lacks: {e}" for e in lacks)])
