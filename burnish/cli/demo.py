"""The demo in the form that fits the machine: measured once, then one of three recipes.

A form is a recipe of the package, and its run records that recipe. So a run repeats whatever a
second measurement would say.
"""

from __future__ import annotations

from burnish import config, machine, plan, sizes
from burnish.plan import Lines, Size
from burnish.schema.recipe import Recipe
from burnish.wording import counted, duration

FORMS = {"small": "demo-small", "medium": "demo-medium", "full": "keywords"}
"""From the shortest to the longest."""
BUDGET_S = 540.0
"""Seconds that the training may take, so that set-up, download and training end in 12 minutes."""
SECONDS = 1.0
"""How long the machine is measured."""
SIZE = Size(parameters=134_515_008, cached=11_520, context=8192, longest_prompt=45, layers=30)
"""The size of the default model, whose files may not be here yet."""


def choose(*, is_full: bool = False, seed: int | None = None) -> tuple[Recipe, Lines]:
    """Measures the machine and chooses the longest form that fits the budget, or the full one.

    Returns its recipe, with no precision left open, and lines about the machine, the form and the
    time it takes.
    """
    changes = {} if seed is None else {"seed": seed}
    recipes = {name: sizes.settled(config.load(FORMS[name], changes)) for name in FORMS}
    rates = machine.measure(SECONDS, precision=recipes["small"].train.precision)
    times = {name: plan.seconds(recipe, SIZE, rates) for name, recipe in recipes.items()}
    fits = [name for name in FORMS if name == "small" or times[name] <= BUDGET_S]
    form = "full" if is_full else fits[-1]
    recipe, time = recipes[form], duration(times[form])
    known = machine.gpu() or ", ".join([machine.processor(), *machine.instructions()[:1]])
    speed = f"{rates.decode_gflops:,.0f} to {rates.learn_gflops:,.0f} GFLOP/s in {rates.precision}"
    steps = f"{recipe.train.steps} steps of {recipe.rollout.batch} responses"
    return recipe, [
        ("machine", f"{known}, {counted(machine.cores(), 'core')}: {speed}"),
        ("form", f"{form} of {', '.join(FORMS)}: recipe {recipe.name}"),
        ("what it does", recipe.description),
        ("training", f"{steps}, about {time}"),
    ]
