import math
from pathlib import Path

import pytest

from burnish.errors import ConfigError
from burnish.recipe.load import (
    PRESETS,
    RECIPES,
    effective_settings,
    format_toml,
    list_recipes,
    load_recipe,
    parse_override,
    read_recipe_table,
    recipe_to_toml,
    with_precision,
)
from burnish.recipe.models import ScratchConfig, SorterConfig
from burnish.recipe.objective.kl import KL
from burnish.recipe.recipe import Recipe
from burnish.recipe.tasks import KeywordsTask, SortTask


def refused(*overrides, name="sort"):
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_loads_and_says_what_it_is(name):
    recipe = load_recipe(name)
    assert recipe.description
    assert recipe.name == name


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_holds_only_what_differs_or_names_its_task(name):
    given = read_recipe_table(name)
    for section, values in given.items():
        if isinstance(values, dict) and section == "model":
            kind = ScratchConfig if values.get("name") == "scratch" else SorterConfig
            defaults = kind().model_dump() | {"name": ""}
            assert all(defaults[key] != value for key, value in values.items()), section


def test_the_resolved_recipe_is_a_recipe(tmp_path):
    changes = ["objective.loss=clip", "objective.loss.high=inf", "objective.kl=k2", "seed=7"]
    recipe = load_recipe("sort", changes)
    file = tmp_path / "again.toml"
    file.write_text(recipe_to_toml(recipe))
    again = load_recipe(str(file))
    assert again == recipe
    assert again.objective.loss.high == math.inf


def test_a_list_of_sections_is_stored_as_it_is_given(tmp_path):
    pieces = [{"name": "reject", "level": "sequence", "high": math.inf}, {"name": "truncate"}]
    recipe = load_recipe("sort", {"objective": {"importance": pieces}})
    file = tmp_path / "again.toml"
    file.write_text(recipe_to_toml(recipe))
    assert (
        'importance = [{ name = "reject", level = "sequence", low = 0.0, high = inf }, '
        '{ name = "truncate", level = "token", low = 0.0, high = 2.0 }]'
    ) in file.read_text().splitlines()
    assert load_recipe(file) == load_recipe(recipe) == recipe
    one = load_recipe("sort", {"objective": {"importance": pieces[:1]}})
    assert one == load_recipe("sort", {"objective": {"importance": pieces[0]}})
    preset = {"preset": "olmo3", "task.length": 3}
    assert load_recipe("sort", preset).objective.importance.high == 2
    assert load_recipe(recipe, preset).objective.importance.name == "truncate"
    assert load_recipe("sort", preset | {"objective.importance": pieces}).objective.corrections


def test_toml_round_trip():
    import tomllib

    table = {"a": 'say "hi"\\\n', "b": [1, 2.5], "c": {"d": True, "e": 1e-6, "f": math.inf}}
    table["h"] = {"i": {"j": {"k": 1}, "l": {}}, "m": {"n": "o"}}
    assert tomllib.loads(format_toml({**table, "g": None})) == table


def test_a_recipe_with_control_characters_is_read_back(tmp_path):
    every = "".join(map(chr, range(256))) + "é\u2028\u0085🙂"
    recipe = load_recipe("keywords", {"rollout": {"stop": ["\r\n", "\x00\x7f", every]}})
    file = tmp_path / "recipe.toml"
    file.write_text(recipe_to_toml(recipe), encoding="utf-8")
    assert load_recipe(file).rollout.stop == recipe.rollout.stop


def test_overrides_are_read_as_toml_or_else_as_words():
    assert parse_override("a.b=3") == {"a.b": 3}
    assert parse_override("a.b=1e-3") == {"a.b": 1e-3}
    assert parse_override("a.b=k3") == {"a.b": "k3"}
    assert parse_override("a = true") == {"a": True}
    for bad in ("a.b", "=3", "a..b=1"):
        with pytest.raises(ConfigError, match=r"section\.key=value"):
            parse_override(bad)


def test_overrides_may_be_tables():
    """A dict, dotted or nested, says what --set says; a path in it is its text."""
    texts = ["train.steps=3", "objective.loss=reinforce"]
    expected = load_recipe("sort", texts)
    assert load_recipe("sort", {"train": {"steps": 3}, "objective": {"loss": "reinforce"}}) == (
        expected
    )
    assert load_recipe("sort", {"train.steps": 3, "objective.loss": "reinforce"}) == expected
    assert load_recipe("sort", [texts[0], {"objective": {"loss": "reinforce"}}]) == expected
    assert load_recipe("sort", texts[0]).train.steps == 3
    named = load_recipe("keywords", {"model": Path("some/run"), "train": {"micro_tokens": None}})
    assert named == load_recipe("keywords", ["model.name=some/run"])
    assert load_recipe("keywords", ["model=some/run"]) == named


def test_a_recipe_may_be_a_table():
    table = read_recipe_table("sort")
    assert load_recipe(table | {"name": "sort"}) == load_recipe("sort")
    assert load_recipe(table).name == "run"
    assert load_recipe({"task": "sort"}, {"seed": 3}).seed == 3
    assert load_recipe(RECIPES / "sort.toml") == load_recipe("sort")
    assert "did you mean 'train.steps'?" in refused(name={"train": {"step": 3}})
    assert "has no effect" in refused(name={"objective": {"kl": {"coefficient": 0.1}}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train": {"step": 3}}, "unknown setting 'train.step'; did you mean 'train.steps'?"),
        ({"steps": 3}, "did you mean 'train.steps'?"),
        ({"train": 3}, "train is a section, got 3; set its settings, such as train.steps"),
        ({"objective": {"kl": 3}}, "objective.kl is a section, got 3; set its settings, such as"),
        ({"model": 3}, "model is a section, got 3; set its settings, such as model."),
    ],
)
def test_tables_are_refused_with_the_words_of_the_command_line(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe("sort", overrides)
    assert message in str(caught.value)


def test_seed_and_overrides_win_over_the_recipe():
    recipe = load_recipe("sort", ["train.steps=7", "train.steps=8", {"seed": 5}])
    assert (recipe.train.steps, recipe.seed) == (8, 5)


def test_an_unknown_key_names_the_nearest():
    assert "unknown setting 'train.step'; did you mean 'train.steps'?" in refused("train.step=3")
    assert "did you mean 'train.learning_rate'?" in refused("train.learningrate=1")
    assert "did you mean 'rollout.batch'?" in refused("rolout.batch=3")
    assert "there are name, description, seed, task, model" in refused("zzz=3")
    with pytest.raises(ConfigError, match=r"there is no recipe 'nowhere\.toml'"):
        load_recipe("nowhere.toml")


def test_an_unknown_name_names_the_nearest():
    message = refused("objective.loss=clipp")
    assert message.startswith("objective.loss.name must be reinforce or unclipped or clip or cispo")
    assert "did you mean 'clip'?" in message
    with pytest.raises(ConfigError, match="no recipe 'sorts'; did you mean 'sort'"):
        load_recipe("sorts")


def test_wrong_values_are_said_with_the_rule():
    assert refused("train.learning_rate=-1") == "train.learning_rate must be greater than 0, got -1"
    whole, number = "must be a whole number, such as 8", "must be a number, such as 0.5 or 1e-5"
    assert refused("train.steps=many") == f"train.steps {whole}, got 'many'"
    assert refused("train.steps=1.5") == f"train.steps {whole}, got 1.5"
    assert refused("train.learning_rate=abc") == f"train.learning_rate {number}, got 'abc'"
    message = refused("rollout.temperature=0")
    assert message.startswith("rollout.temperature must be greater than 0, got 0; ")
    assert "validation.temperature = 0 is greedy evaluation" in message
    load_recipe("sums", ["validation.temperature=0", "rollout.temperature=1"])


def test_a_file_that_is_not_toml(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("a = = 3")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        load_recipe(str(file))


def test_what_an_override_replaces_takes_its_settings_along():
    recipe = load_recipe("sort", ["objective.loss=reinforce"])  # the recipe sets low
    assert effective_settings(recipe)["objective"]["loss"] == {"name": "reinforce"}
    again = load_recipe("sort", ["objective.kl.coefficient=0.3", "objective.kl=k2"])
    assert again.objective.kl == KL(name="k2", coefficient=0.3)


def test_a_task_is_chosen_by_name_and_brings_its_own_settings():
    language = ["task.name=keywords", "model.name=smollm2-135m"]
    recipe = load_recipe("sort", [*language, "task.most=3"])
    assert recipe.task == KeywordsTask(most=3)
    assert load_recipe("sort", ["task.length=4"]).task == SortTask(length=4)
    assert Recipe.model_validate({"task": {"length": 4}}).task == SortTask(length=4)


def test_the_resolved_recipe_of_every_task_is_a_recipe(tmp_path):
    for overrides in (
        ["task.name=keywords", "task.must_end=true"],
        ["task.name=files", "task.train=a.jsonl", "task.validation=b.jsonl", "task.reward=r.py:f"],
    ):
        recipe = load_recipe("sort", ["model.name=smollm2-135m", *overrides])
        file = tmp_path / "again.toml"
        file.write_text(recipe_to_toml(recipe))
        assert load_recipe(str(file)) == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.name=keyword"], "task.name must be sort or keywords or files or math"),
        (["task.name=keyword"], "did you mean 'keywords'?"),
        (["task.name=3"], "got '3'"),
        (["task.name=keywords", "task.length=3"], "no effect with task = 'keywords'; remove it"),
        (["task.name=keywords", "task.mots=3"], "did you mean 'task.most'?"),
        (["task.name=keywords", "task.most=1"], "task needs least at or below most, got 2 and 1"),
        (["task.name=files", "task.workers=0"], "task.workers must be greater than or equal to 1"),
        (["rollout.max_errors=2"], "rollout.max_errors must be less than or equal to 1"),
    ],
)
def test_tasks_are_checked(overrides, message):
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], ("bf16", "bf16")),
        (["train.precision=fp32"], ("fp32", "fp32")),
        (["engine.precision=fp32"], ("bf16", "fp32")),
        (["train.precision=fp32", "engine.precision=bf16"], ("fp32", "bf16")),
    ],
)
def test_a_sampler_takes_the_learners_precision_unless_it_is_given_one(given, found):
    recipe = with_precision(load_recipe("keywords", given), "bf16")
    assert (recipe.train.precision, recipe.engine.precision) == found


def test_the_constant_is_the_longest_response_unless_it_is_given():
    lengths = [
        load_recipe(recipe, ["objective.reduction=constant", *more]).objective.reduction.length
        for recipe, *more in (
            ("sort",),
            ("sums",),
            ("sums", "rollout.max_tokens=99"),
            ("sums", "objective.reduction.length=7"),
        )
    ]
    assert lengths == [3, 24, 99, 7]


@pytest.mark.parametrize("name", list_recipes(PRESETS))
def test_a_preset_goes_on_any_recipe(name):
    for recipe in ("sums", "keywords", "gsm8k"):
        loaded = load_recipe(recipe, [f"preset={name}"])
        assert effective_settings(load_recipe(loaded)) == effective_settings(loaded)
        assert loaded.description == load_recipe(recipe).description


def test_a_preset_overrides_the_recipe_and_set_overrides_both(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "dr-grpo"\n[objective]\nadvantage = "raw"\nratio = "sequence"\n')
    assert load_recipe(file).objective.advantage.name == "group_mean"
    changed = load_recipe(file, ["objective.advantage=leave_one_out", "objective.loss.high=0.3"])
    assert (changed.objective.advantage.name, changed.objective.ratio) == ("leave_one_out", "token")
    assert (changed.objective.loss.low, changed.objective.loss.high) == (0.2, 0.3)
    assert load_recipe(file, ["preset=gspo"]).objective.ratio == "sequence"


def test_a_presets_setting_without_effect_is_left_out_and_an_override_is_refused():
    recipe = load_recipe("sort", ["preset=gspo", "objective.loss=reinforce"])
    assert recipe.objective.ratio == "token"
    with pytest.raises(ConfigError, match=r"objective\.ratio has no effect with objective\.loss"):
        load_recipe("sort", ["preset=rloo", "objective.ratio=sequence"])
    with pytest.raises(ConfigError, match="there is no preset 'gspoo'; did you mean 'gspo'"):
        load_recipe("sort", ["preset=gspoo"])
