"""This machine, the optional parts that are installed on it, and the time and the missing parts of
each recipe."""

from __future__ import annotations

from pathlib import Path

from burnish import build, config, estimate, machine, preflight
from burnish.machine import Rates
from burnish.plan import Lines, Section, spell

SECONDS = 0.4
"""How long each precision is measured."""


def examine(runs: Path = Path("runs")) -> list[Section]:
    """Sections of (name, description), made in a few seconds; ``runs`` is the directory of runs."""
    rates = {name: machine.measure(SECONDS, precision=name) for name in ("fp32", "bf16")}
    return [
        ("machine", [*_machine(runs), *_rates(rates)]),
        ("optional parts", [(name, _extra(name)) for name in preflight.EXTRAS]),
        ("recipes", [(name, _recipe(name, runs, rates)) for name in config.list_recipes()]),
    ]


def _machine(runs: Path) -> Lines:
    known = ", ".join(machine.instructions()) or "not told by this system"
    has_bf16 = machine.multiplies("bf16", "cpu")
    bf16 = "bf16 in hardware" if has_bf16 else "no bf16 in hardware: fp32 is as fast or faster"
    gpu = machine.gpu()
    return [
        ("processor", machine.processor()),
        ("cores", f"{machine.cores()} for this process"),
        ("instructions", f"{known} ({bf16})"),
        ("memory", _free("cpu")),
        ("GPU", "none that torch finds" if gpu is None else f"{gpu}, {_free('cuda')}"),
        ("disk", f"{spell(machine.disk(runs))} free in {runs.absolute()}"),
    ]


def _free(device: str) -> str:
    total, free = machine.memory(device)
    return f"{spell(free)} of {spell(total)} free"


def _rates(rates: dict[str, Rates]) -> Lines:
    return [
        (
            f"{name} products",
            f"{rate.decode_gflops:,.0f} GFLOP/s while sampling, {rate.learn_gflops:,.0f} while "
            f"learning{'' if rate.precision == name else ' (computed in fp32)'}",
        )
        for name, rate in rates.items()
    ]


def _extra(name: str) -> str:
    is_here = preflight.is_installed(name)
    state = "installed" if is_here else f"pip install 'burnish[{name}]'"
    return f"{state}: {preflight.EXTRAS[name][1]}"


def _recipe(name: str, runs: Path, rates: dict[str, Rates]) -> str:
    """About how long the recipe takes here, and a line for each thing that it lacks."""
    recipe, size, lacks = build.look(config.load(name), runs / name, has_prompts=False)
    if first := preflight.first_run(recipe.source):  # it begins with another model of that size
        size = build.measure(first)
    rate = rates.get(recipe.train.precision, rates["fp32"])
    time = f"{estimate.spoken(recipe, size, rate)}{'' if lacks else ', ready'}"
    return "\n".join([time, *(f"lacks: {problem}" for problem in lacks)])
