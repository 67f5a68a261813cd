"""The reference of settings: complete, the same as the page, and found by prefix."""

from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from burnish.errors import ConfigError
from burnish.recipe import settings
from burnish.recipe.load import list_recipes, load_recipe, setting_names
from burnish.recipe.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def sections(annotation):
    """All section classes in an annotation, recursively."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    else:
        for part in get_args(annotation):
            yield from sections(part)


def test_every_field_of_every_section_has_a_description():
    """The name of a kind, which has only literal values, is described by the section's field."""
    missing = {
        f"{section.__name__}.{name}"
        for section in sections(Recipe)
        for name, field in section.model_fields.items()
        if not (field.description or "").strip()
        and not (name == "name" and get_origin(field.annotation) is Literal)
    }
    assert not missing, "give these fields a description of one sentence"


def test_descriptions_are_single_clauses():
    for entry in settings.describe_sections():
        for one in entry.settings:
            assert one.about == " ".join(one.about.split()), one.name
            assert not one.about.endswith("."), f"{one.name}: end without a full stop"


def test_the_page_is_generated():
    command = "python -m burnish settings --markdown > docs/settings.md"
    assert PAGE.read_text(encoding="utf-8") == settings.settings_page(), f"run: {command}"


def test_every_setting_is_listed_and_every_listed_name_is_a_setting():
    listed = {one.name for entry in settings.describe_sections() for one in entry.settings}
    known = set(setting_names(Recipe))
    assert listed <= known
    groups = {name for name in known if any(other.startswith(f"{name}.") for other in known)}
    excluded = {
        name
        for section in sections(Recipe)
        for name, field in section.model_fields.items()
        if field.exclude  # only a script can pass it
    }
    left = {n for n in known - groups - listed if not n.startswith("task.tasks.")}
    assert {name.rpartition(".")[2] for name in left} == excluded == {"rows", "function"}


def test_kinds_types_bounds_and_users():
    by_kind = {
        (entry.kind, one.name): one
        for entry in settings.describe_sections()
        for one in entry.settings
    }
    low = by_kind['"clip"', "objective.loss.low"]
    assert (low.type, low.default) == ("number ≥ 0", "0.2")
    assert (low.set_by["sort"], low.set_by["preset gspo"]) == (0.01, 3e-4)
    assert by_kind['"dppo"', "objective.loss.low"].set_by == {}
    steps = by_kind["", "train.steps"]
    assert (steps.type, steps.default, steps.set_by["keywords"]) == ("integer ≥ 1", "100", 64)
    assert by_kind["", "model.name"].set_by["sums-sft"] == "scratch"
    kinds = '"none", "truncate", "mask", "reject"'  # each once, although a list of them is accepted
    assert by_kind["", "objective.importance.name"].type == kinds
    assert by_kind["", "objective.kl.name"].type == '"none", "k1", "k2", "k3"'
    assert by_kind['"constant"', "objective.reduction.length"].default.startswith("100%")
    assert by_kind["", "train.betas"].type == "[number, number]"
    assert by_kind["", "rollout.stop"].type == "list of: text"
    assert ("any other name", "model.adapter") in by_kind


def test_the_recipes_that_set_a_setting_are_those_whose_file_does():
    name, users = "train.learning_rate", set()
    for recipe in list_recipes():
        if load_recipe(recipe).train.learning_rate != Recipe().train.learning_rate:
            users.add(recipe)
    (entry,) = settings.find_settings(name)
    assert users <= set(entry.settings[0].set_by)


def test_settings_are_found_by_prefix_last_part_and_foreign_name():
    found = settings.find_settings("rollout")
    assert {one.name.partition(".")[0] for e in found for one in e.settings} == {"rollout"}
    assert "rollout.think.tokens" in {one.name for e in found for one in e.settings}
    (entry,) = settings.find_settings("group_size")
    assert [one.name for one in entry.settings] == ["rollout.group_size"]
    said = settings.answer_settings("num_generations")
    assert said.startswith("TRL's num_generations is rollout.group_size\n\n[rollout]: ")
    assert "train.steps = 100   (integer ≥ 1)" in settings.answer_settings("")
    with pytest.raises(ConfigError, match=r"no setting 'train\.step'; did you mean 'train\.steps'"):
        settings.answer_settings("train.step")
