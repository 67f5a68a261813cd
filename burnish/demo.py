"""The demo in the form that fits the machine: measured once, then one of three recipes.

A form is a recipe of the package, and its run records that recipe. So a run repeats whatever a
second measurement would say.
"""

from __future__ import annotations

from typing import NamedTuple

from burnish import build, config, estimate, machine
from burnish.config import Recipe
from burnish.errors import ConfigError
from burnish.machine import Rates
from burnish.plan import Lines, Size
from burnish.wording import counted, duration

FORMS = {"small": "demo-small", "medium": "demo-medium", "full": "keywords"}
"""From the shortest to the longest."""
BUDGET_S = 540.0
"""Seconds that the training may take, so that set-up, download and training end in 12 minutes."""
SECONDS = 1.0
"""How long the machine is measured."""
SIZE = Size(
    parameters=134_515_008,
    cached=2 * 30 * 3 * 64,
    context=8192,
    longest_prompt=45,
    layers=30,
    layer=3_540_096,
)
"""The size of the default model, whose files may not be here yet."""


class Choice(NamedTuple):
    form: str
    recipe: Recipe
    """With no precision left open."""
    seconds: float
    """About how long the training takes here."""
    rates: Rates


def choose(form: str | None = None, *, seed: int | None = None) -> Choice:
    """Measures the machine and chooses the longest form that fits the budget, or the one given."""
    if form is not None and form not in FORMS:
        raise ConfigError(f"--form must be {' or '.join(FORMS)}, got {form!r}")
    recipes = {name: build.settled(config.load(FORMS[name], seed=seed)) for name in FORMS}
    rates = machine.measure(SECONDS, precision=recipes["small"].train.precision)
    times = {name: estimate.seconds(recipe, SIZE, rates) for name, recipe in recipes.items()}
    fits = [name for name, seconds in times.items() if seconds <= BUDGET_S]
    chosen = form or (fits[-1] if fits else "small")
    return Choice(chosen, recipes[chosen], times[chosen], rates)


def describe(choice: Choice) -> Lines:
    """Lines about the machine, the chosen form and the time it takes."""
    rates, recipe = choice.rates, choice.recipe
    known = machine.gpu() or ", ".join([machine.processor(), *machine.instructions()[:1]])
    speed = f"{rates.decode_gflops:,.0f} to {rates.learn_gflops:,.0f} GFLOP/s in {rates.precision}"
    return [
        ("machine", f"{known}, {counted(machine.cores(), 'core')}: {speed}"),
        ("form", f"{choice.form} of {', '.join(FORMS)}: recipe {recipe.name}"),
        ("what it does", recipe.description),
        (
            "training",
            f"{recipe.train.steps} steps of {recipe.rollout.batch} responses, "
            f"about {duration(choice.seconds)}",
        ),
    ]
