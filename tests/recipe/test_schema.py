"""The JSON schema accepts the recipes that burnish accepts, and rejects wrong ones."""

import json
import tomllib

import pytest
from jsonschema import Draft7Validator

from burnish.errors import ConfigError
from burnish.recipe.load import RECIPES, list_recipes, load_recipe, recipe_to_toml
from burnish.recipe.schema import recipe_schema

SCHEMA = recipe_schema()
Draft7Validator.check_schema(SCHEMA)
VALIDATOR = Draft7Validator(SCHEMA)


@pytest.mark.parametrize("name", list_recipes())
def test_builtin_recipes_fit(name):
    text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    VALIDATOR.validate(tomllib.loads(text))
    resolved = recipe_to_toml(load_recipe(name))  # every kind as a table with all its settings
    VALIDATOR.validate(tomllib.loads(resolved))


RIGHT = [
    "preset = 'dapo'",
    "task = 'keywords'\nmodel = 'smollm2-135m'\nengine = 'vllm'\nruntime = 'ray'",
    "[objective]\nadvantage = 'raw'\nloss = {high = 0.3}\nkl = {name = 'k3', coefficient = 0.1}",
    "[objective]\nreduction = 'constant'\n[length]\nname = 'overlong'",
    "[train]\nclip_norm = inf\nbetas = [0.9, 0.99]\nlearn = {name = 'layers', last = 2}",
    "[model]\nname = 'scratch'\nlayers = 2\n[runtime]\nname = 'ray'\n[runtime.learner]\ngpus = 1",
    "[objective]\nimportance = ['reject', {name = 'truncate', level = 'sequence'}]",
    "[task]\nname = 'files'\ntrain = 'a.jsonl'\n[[task.rewards]]\nreward = 'mine.py:score'",
    "[task]\nname = 'mixture'\nweights = {a = 1, b = 2}\n[task.tasks]\na = {name = 'keywords'}\n"
    "b = {name = 'gym', generator = 'chain_sum'}",
]


@pytest.mark.parametrize("text", RIGHT)
def test_short_forms_and_defaults_fit(text):
    VALIDATOR.validate(tomllib.loads(text))


WRONG = [
    "lr = 1",
    "[train]\nbath = 4",
    "[train]\nsteps = 0",
    "[train]\nsteps = 'many'",
    "[train]\nbetas = [0.9, 2]",
    "[train]\nlearn = 'layers'",
    "[train.learn]\nname = 'all'\nlast = 2",
    "[objective]\nloss = 'clop'",
    "[objective.loss]\nname = 'reinforce'\nlow = 0.1",
    "[objective.loss]\ncap = 5",
    "[objective]\nkl = {coefficient = 0.1}",
    "[objective]\nimportance = ['rejec']",
    "[task]\nname = 'sort'\ntrain = 'a.jsonl'",
    "[task]\nname = 'gym'",
    "[model]\nname = 'smollm2-135m'\nlayers = 2",
    "[engine]\nname = 'hf'\nkv_mb = 100",
    "[engine]\nname = 'sglang'",
    "[length]\nname = 'target'",
    "device = 'tpu'",
]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_recipes_do_not_fit(text):
    table = tomllib.loads(text)
    assert list(VALIDATOR.iter_errors(table))
    with pytest.raises(ConfigError):
        load_recipe(table)


def test_what_only_a_script_can_pass_is_left_out():
    files = SCHEMA["definitions"]["FilesTask"]["properties"]
    assert not {"rows", "function"} & files.keys()
    assert "null" not in json.dumps(SCHEMA)
