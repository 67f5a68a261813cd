"""This machine, the optional parts that are installed on it, and the time and the missing parts of
each recipe."""

from __future__ import annotations

from pathlib import Path

from burnish import build, config, machine, plan, preflight, sizes
from burnish.errors import installed
from burnish.machine import Rates
from burnish.plan import Lines, Section, spell

SECONDS = 0.4
"""How long each precision is measured."""


def examine(runs: Path = Path("runs")) -> list[Section]:
    """Sections of (name, description), made in a few seconds; ``runs`` is the directory of runs."""
    rates = {name: machine.measure(SECONDS, precision=name) for name in ("fp32", "bf16")}
    return [
        (
            "machine",
            [*_machine(runs), *((f"{name} products", _rate(name, rates[name])) for name in rates)],
        ),
        ("optional parts", [(name, _extra(name)) for name in preflight.EXTRAS]),
        ("recipes", [(name, _recipe(name, runs, rates)) for name in config.list_recipes()]),
    ]


def _machine(runs: Path) -> Lines:
    gpu = machine.gpu()
    return [
        ("processor", machine.processor()),
        ("cores", f"{machine.cores()} for this process"),
        ("instructions", ", ".join(machine.instructions()) or "not told by this system"),
        ("memory", _free("cpu")),
        ("GPU", "none that torch finds" if gpu is None else f"{gpu}, {_free('cuda')}"),
        ("disk", f"{spell(machine.disk(runs))} free in {runs.absolute()}"),
    ]


def _free(device: str) -> str:
    total, free = machine.memory(device)
    return f"{spell(free)} of {spell(total)} free"


def _rate(name: str, rates: Rates) -> str:
    _, precision, sampling, learning = rates
    note = "" if precision == name else " (computed in fp32)"
    return f"{sampling:,.0f} GFLOP/s while sampling, {learning:,.0f} while learning{note}"


def _extra(name: str) -> str:
    _, purpose = preflight.EXTRAS[name]
    state = "installed" if preflight.is_installed(name) else installed(name)
    return f"{state}: {purpose}"


def _recipe(name: str, runs: Path, rates: dict[str, Rates]) -> str:
    """About how long the recipe takes here, and a line for each thing that it lacks."""
    recipe, size, lacks = build.look(config.load(name), runs / name, has_prompts=False)
    if first := preflight.first_run(recipe.source):  # it begins with another model of that size
        size = sizes.measure(first)
    rate = rates.get(recipe.train.precision, rates["fp32"])
    time = f"{plan.spoken(recipe, size, rate)}{'' if lacks else ', ready'}"
    return "\n".join([time, *(f"lacks: {problem}" for problem in lacks)])
