"""``burnish demo``: measure the machine, and choose the longest recipe within a time limit.

The run records the chosen recipe, so that it can be repeated whatever another measurement shows.
"""

from __future__ import annotations

from burnish.console.text import counted, duration
from burnish.launch.models import with_own_precision
from burnish.machine import hardware
from burnish.recipe.costs import Size, estimate_seconds
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import Lines
from burnish.recipe.recipe import Recipe

FORMS = {
    "short": "demo-short",
    "small": "demo-small",
    "medium": "demo-medium",
    "full": "keywords",
}
"""Recipes of the demo by duration, shortest first."""
BUDGET_S = 540.0
"""Time limit of the training in seconds, so that set-up, download and training take 12 minutes."""
SMALL_S = 750.0
"""Limit for the estimate of the form "small", which is above its actual time on two cores: it took
421 seconds on AVX-512 cores at which the estimate is about 650."""
SECONDS = 1.0
"""Duration of the measurement in seconds."""
SIZE = Size(parameters=134_515_008, cached=11_520, context=8192, longest_prompt=45, layers=30)
"""Size of the default model, which may not be downloaded yet."""


def choose_demo(*, is_full: bool = False, seed: int | None = None) -> tuple[Recipe, Lines]:
    """Measure the machine, which takes about a second, and choose the longest recipe of `FORMS`
    that it can train within `BUDGET_S`, or the shortest if it can train none. ``is_full`` chooses
    the full recipe on any machine. ``seed`` is the run's seed; None for the recipe's.

    Returns the recipe with its precision resolved, and lines of (name, description) about the
    machine, the recipe and its duration.
    """
    changes = {} if seed is None else {"seed": seed}
    recipes = {name: with_own_precision(load_recipe(FORMS[name], changes)) for name in FORMS}
    rates = hardware.measure_rates(SECONDS, precision=recipes["short"].train.precision)
    times = {name: estimate_seconds(recipe, SIZE, rates) for name, recipe in recipes.items()}
    limits = {"small": SMALL_S}
    fits = [name for name in FORMS if name == "short" or times[name] <= limits.get(name, BUDGET_S)]
    form = "full" if is_full else fits[-1]
    recipe, time = recipes[form], duration(times[form])
    known = hardware.gpu() or ", ".join([hardware.processor(), *hardware.instructions()[:1]])
    speed = f"{rates.decode_gflops:,.0f} to {rates.learn_gflops:,.0f} GFLOP/s in {rates.precision}"
    steps = f"{recipe.train.steps} steps of {recipe.rollout.batch} responses"
    return recipe, [
        ("machine", f"{known}, {counted(hardware.cores(), 'core')}: {speed}"),
        ("form", f"{form} of {', '.join(FORMS)}: recipe {recipe.name}"),
        ("what it does", recipe.description),
        ("training", f"{steps}, about {time}"),
    ]
