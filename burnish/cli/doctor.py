"""``burnish doctor``: describe this machine, the installed optional parts, and for each recipe its
estimated duration and missing requirements."""

from __future__ import annotations

from pathlib import Path

from burnish.errors import install_hint
from burnish.launch.preflight import EXTRAS, is_installed, missing_packages, missing_run
from burnish.launch.resolve import survey
from burnish.machine import hardware
from burnish.recipe.costs import format_bytes
from burnish.recipe.load import list_recipes, load_recipe
from burnish.recipe.plan import Lines, PlanSection, format_estimate
from burnish.types import Rates

SECONDS = 0.4
"""Duration in seconds of the measurement of each precision."""


def examine(runs: Path = Path("runs")) -> list[PlanSection]:
    """Measure the machine; return sections of (name, description) lines about the machine, the
    optional parts and the recipes.

    ``runs`` is the directory of runs. This takes a few seconds.
    """
    busy = _busy()  # before the measurement, which is itself a load
    rates = {name: hardware.measure_rates(SECONDS, precision=name) for name in ("fp32", "bf16")}
    return [
        (
            "machine",
            [
                *_machine(runs),
                *((f"{name} products", _rate(name, rates[name])) for name in rates),
                *busy,
            ],
        ),
        ("optional parts", [(name, _extra(name)) for name in EXTRAS]),
        ("recipes", [(name, _recipe(name, runs, rates)) for name in list_recipes()]),
    ]


def _machine(runs: Path) -> Lines:
    gpu = hardware.gpu()
    return [
        ("processor", hardware.processor()),
        ("cores", f"{hardware.cores()} for this process"),
        ("instructions", ", ".join(hardware.instructions()) or "not reported by this system"),
        ("memory", _free("cpu")),
        ("GPU", "none found by torch" if gpu is None else f"{gpu}, {_free('cuda')}"),
        ("disk", f"{format_bytes(hardware.disk(runs))} free in {runs.absolute()}"),
    ]


def _busy() -> Lines:
    """Return a line if more processes want a core than the machine has cores."""
    wanted, cores = hardware.load()
    if wanted <= cores:
        return []
    busy = (
        f"{wanted:.1f} processes wanted the {cores} cores in the last minute, so the measured "
        "speed may be too low and the estimates below too long; repeat this when "
        "the machine is idle"
    )
    return [("load", busy)]


def _free(device: str) -> str:
    total, free = hardware.memory(device)
    return f"{format_bytes(free)} of {format_bytes(total)} free"


def _rate(name: str, rates: Rates) -> str:
    _, precision, sampling, learning = rates
    note = "" if precision == name else " (computed in fp32)"
    return f"{sampling:,.0f} GFLOP/s while sampling, {learning:,.0f} while learning{note}"


def _extra(name: str) -> str:
    _, purpose = EXTRAS[name]
    lacking = missing_packages(name)
    is_whole = is_installed(name) and not lacking
    lacks = f"lacks {' and '.join(lacking)}; " if lacking else ""
    return f"{'installed' if is_whole else lacks + install_hint(name)}: {purpose}"


def _recipe(name: str, runs: Path, rates: dict[str, Rates]) -> str:
    """Return a text with the estimated duration of a recipe and a line for each missing
    requirement."""
    found = survey(load_recipe(name), runs / name)
    recipe, size = found.recipe, found.size
    if first := missing_run(recipe.model.files):  # the model of that run has the same size
        size = survey(first, runs / name).size
    rate = rates.get(recipe.train.precision, rates["fp32"])
    time = f"{format_estimate(recipe, size, rate)}{'' if found.problems else ', ready'}"
    return "\n".join([time, *(f"lacks: {problem}" for problem in found.problems)])
