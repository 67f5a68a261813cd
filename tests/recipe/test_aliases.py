"""Names of other systems are answered with burnish's name, wherever a setting is given."""

import re
import tomllib
from pathlib import Path

import pytest

import burnish
from burnish.errors import ConfigError
from burnish.recipe.aliases import (
    ALGORITHMS,
    ALIASES,
    explain_algorithm,
    explain_alias,
    find_alias,
)
from burnish.recipe.load import PRESETS, list_recipes, load_recipe, setting_names
from burnish.recipe.recipe import Recipe


def test_the_table_names_settings_of_this_package_and_none_of_its_keys_is_one():
    known = set(setting_names(Recipe))
    assert {alias.setting for alias in ALIASES.values()} <= known
    assert not ALIASES.keys() & known


@pytest.mark.parametrize("name", ALIASES)
def test_every_name_is_answered(name):
    with pytest.raises(ConfigError) as caught:
        load_recipe("sort", f"{name}=1")
    alias = ALIASES[name]
    said = f"unknown setting {name!r}: {alias.system}'s {name} is {alias.setting}"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("algorithm.adv_estimator", "objective.advantage"),
        ("data.train_batch_size", "rollout.batch"),
        ("actor_rollout_ref.actor.optim.lr", "train.learning_rate"),
        ("critic.optim.lr", "critic.learning_rate"),
        ("actor_rollout_ref.actor.kl_loss_coef", "objective.kl.coefficient"),
        ("train.lr", "train.learning_rate"),
    ],
)
def test_sections_before_a_name_do_not_matter(given, setting):
    assert find_alias(given).setting == setting
    with pytest.raises(ConfigError, match=f" is {setting}"):
        load_recipe("sort", f"{given}=1")


def test_files_and_python_get_the_same_answer(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[data]\ntrain_batch_size = 8\n[actor_rollout_ref.rollout]\nn = 4\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(file))
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "unknown setting 'data.train_batch_size'",
        "unknown setting 'actor_rollout_ref.rollout.n'",
    ]
    with pytest.raises(ConfigError, match=r"TRL's num_generations is rollout\.group_size"):
        burnish.train("sort", num_generations=8, out=tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


def test_a_setting_without_its_section_and_a_section_of_another_system():
    for given, said in {
        "group_size=2": "unknown setting 'group_size'; did you mean 'rollout.group_size'?",
        "batch=2": "unknown setting 'batch'; did you mean 'rollout.batch' or 'train.batch'?",
        "actor.rollout.temperature=1": "did you mean 'rollout.temperature'?",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_recipe("sort", given)
        assert said in str(caught.value)
    assert explain_alias("rollout") is None


def test_a_published_algorithm_is_neither_a_loss_nor_an_advantage():
    """The answer names its loss and its advantage, which its preset sets, and the preset."""
    for preset in list_recipes(PRESETS):
        objective = load_recipe("sums", f"preset={preset}").objective
        loss, advantage = objective.loss.name, objective.advantage.name
        said = explain_algorithm(preset)
        assert f"loss is {loss!r} and its advantage {advantage!r}; preset = {preset!r}" in said
    grpo = ALGORITHMS["grpo"]
    load_recipe("sums", [f"objective.loss={grpo.loss}", f"objective.advantage={grpo.advantage}"])
    for given in ("grpo", "GRPO", "dapo", "dr_grpo", "Dr.GRPO", "ppo", "rloo", "reinforce++"):
        for kind in ("loss", "advantage"):
            with pytest.raises(ConfigError, match=r"loss is '.*' and its advantage '") as caught:
                load_recipe("sums", f"objective.{kind}={given}")
            assert "did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean 'clip'"):
        load_recipe("sums", "objective.loss=clipp")


QUICK_START = (
    *("output_dir", "run_name", "report_to", "logging_steps", "use_cpu", "bf16", "fp16"),
    *("train_dataset", "eval_dataset", "reward_funcs", "remove_unused_columns", "max_steps"),
    *("save_steps", "save_total_limit", "eval_steps", "learning_rate", "lr_scheduler_type"),
    *("num_generations", "max_completion_length", "max_prompt_length", "beta", "loss_type"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "scale_rewards"),
    "use_bias_correction_kl",
)
"""Arguments of a usual script for TRL's GRPOTrainer that burnish names otherwise."""


def test_the_arguments_of_a_usual_script_are_answered():
    assert [name for name in QUICK_START if find_alias(name) is None] == []


OTHER_VALUES = ('objective.kl = { name = "k3", coefficient = 0.04 }', 'train.precision = "bf16"')
"""Assignments of docs/from_trl.md that are not those of its recipe, but for other arguments."""


def test_the_page_about_trl():
    """Each of its arguments is answered, and each of its assignments is the recipe's."""
    page = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 80
    (written,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    recipe = load_recipe(tomllib.loads(written))
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", page, flags=re.M)
    names = [name for left, _ in rows for name in re.findall(r"`(\w+)", left)]
    assert [name for name in names if find_alias(name) is None] == []
    assigned = [span for _, right in rows for span in re.findall(r"`([^`]+ = [^`]+)`", right)]
    assert len(assigned) > 10
    for span in assigned:
        changed = load_recipe(recipe, span.replace(" = ", "=", 1))
        assert (changed == recipe) == (span not in OTHER_VALUES), span
    assert recipe.gradient_steps_per_rollout == 1
    assert not recipe.is_validated
