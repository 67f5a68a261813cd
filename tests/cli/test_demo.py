"""The demo takes the longest form that fits the machine, and says how long that takes."""

import pytest

from burnish.cli import demo
from burnish.machine import hardware
from burnish.recipe.load import load_recipe
from burnish.types import Rates


def rates(gflops, precision="fp32", device="cpu"):
    return lambda seconds, **asked: Rates(device, precision, gflops, gflops)


@pytest.mark.parametrize(
    ("gflops", "form"),
    [(20, "short"), (70, "short"), (95, "small"), (120, "small"), (600, "medium"), (9000, "full")],
)
def test_the_form_follows_the_machine(monkeypatch, gflops, form):
    monkeypatch.setattr(hardware, "measure_rates", rates(gflops))
    recipe, lines = demo.choose_demo(seed=3)
    assert recipe.name == demo.FORMS[form]
    assert recipe.seed == 3
    assert recipe.train.precision != "auto"
    assert f"{form} of short, small, medium, full" in dict(lines)["form"]
    assert "about" in dict(lines)["training"]


def test_the_full_form_may_be_asked_for(monkeypatch):
    monkeypatch.setattr(hardware, "measure_rates", rates(20))
    assert demo.choose_demo(is_full=True)[0].name == "keywords"


@pytest.mark.parametrize("name", demo.FORMS.values())
def test_every_form_is_grpo_as_published_on_the_reward_that_asks_for_use(name):
    recipe = load_recipe(name)
    pieces = recipe.objective
    assert (pieces.advantage.name, pieces.loss.name, pieces.reduction.name) == (
        "group_zscore",
        "clip",
        "sequence_mean",
    )
    assert (pieces.kl.name, pieces.kl.where) == ("k3", "loss")
    assert recipe.task.reward == "use"
    assert recipe.task.must_end
