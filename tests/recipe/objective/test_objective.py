"""Pieces of an objective as sections of a recipe."""

import pytest

from burnish.errors import ConfigError
from burnish.recipe.load import (
    load_recipe,
)
from burnish.recipe.objective.losses import Cispo, Clip


def refused(*overrides, name="sort"):
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides)
    return str(caught.value)


def test_pieces_that_do_not_go_together_are_refused():
    assert "a gradient of mean 0" in refused("objective.kl=k1")


def test_gdpo_says_how_parts_are_given():
    message = refused("objective.advantage=gdpo")
    assert message.startswith("objective.advantage.parts needs a part of the grade and its weight")
    assert load_recipe("sort", ["objective.advantage=gdpo", "objective.advantage.parts.ordering=1"])


def test_a_piece_may_be_a_name_or_a_table(tmp_path):
    short = load_recipe("sort", ["objective.loss=cispo"]).objective
    assert short.loss == Cispo()
    file = tmp_path / "mine.toml"
    file.write_text('[objective.loss]\nname = "cispo"\ncap = 3\n')
    assert load_recipe(file).objective.loss == Cispo(cap=3)
    assert load_recipe(file, ["objective.loss.floor=1"]).objective.loss == Cispo(cap=3, floor=1)
    assert load_recipe(file, ["objective.loss=clip"]).objective.loss == Clip()
