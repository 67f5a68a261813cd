import math
from pathlib import Path

import pytest

from burnish import api, build, config, sizes
from burnish.errors import ConfigError
from burnish.pieces.losses import Cispo, Clip
from burnish.pieces.terms import KL
from burnish.plan import Size, needs, plan
from burnish.schema.models import ScratchConfig, SorterConfig
from burnish.schema.recipe import Recipe
from burnish.schema.tasks import KeywordsTask, SortTask


def refused(*overrides, name="sort"):
    with pytest.raises(ConfigError) as caught:
        config.load(name, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", config.list_recipes())
def test_every_recipe_loads_and_says_what_it_is(name):
    recipe = config.load(name)
    assert recipe.description
    assert recipe.name == name


@pytest.mark.parametrize("name", config.list_recipes())
def test_a_recipe_holds_only_what_differs_or_names_its_task(name):
    given = config.read_recipe(name)
    for section, values in given.items():
        if isinstance(values, dict) and section == "model":
            kind = ScratchConfig if values.get("name") == "scratch" else SorterConfig
            defaults = kind().model_dump() | {"name": ""}
            assert all(defaults[key] != value for key, value in values.items()), section


def test_the_resolved_recipe_is_a_recipe(tmp_path):
    changes = ["objective.loss=clip", "objective.loss.high=inf", "objective.kl=k2", "seed=7"]
    recipe = config.load("sort", changes)
    file = tmp_path / "again.toml"
    file.write_text(config.to_toml(config.effective(recipe)))
    again = config.load(str(file))
    assert again == recipe
    assert again.objective.loss.high == math.inf


def test_toml_round_trip():
    import tomllib

    table = {"a": 'say "hi"\\\n', "b": [1, 2.5], "c": {"d": True, "e": 1e-6, "f": math.inf}}
    table["h"] = {"i": {"j": {"k": 1}, "l": {}}, "m": {"n": "o"}}
    assert tomllib.loads(config.to_toml({**table, "g": None})) == table


def test_a_recipe_with_control_characters_is_read_back(tmp_path):
    every = "".join(map(chr, range(256))) + "é\u2028\u0085🙂"
    recipe = config.load("keywords", {"rollout": {"stop": ["\r\n", "\x00\x7f", every]}})
    file = tmp_path / "recipe.toml"
    file.write_text(config.to_toml(config.effective(recipe)), encoding="utf-8")
    assert config.load(file).rollout.stop == recipe.rollout.stop


def test_overrides_are_read_as_toml_or_else_as_words():
    assert config.parse_override("a.b=3") == {"a.b": 3}
    assert config.parse_override("a.b=1e-3") == {"a.b": 1e-3}
    assert config.parse_override("a.b=k3") == {"a.b": "k3"}
    assert config.parse_override("a = true") == {"a": True}
    for bad in ("a.b", "=3", "a..b=1"):
        with pytest.raises(ConfigError, match=r"section\.key=value"):
            config.parse_override(bad)


def test_overrides_may_be_tables():
    """A dict, dotted or nested, says what --set says; a path in it is its text."""
    texts = ["train.steps=3", "objective.loss=reinforce"]
    expected = config.load("sort", texts)
    assert config.load("sort", {"train": {"steps": 3}, "objective": {"loss": "reinforce"}}) == (
        expected
    )
    assert config.load("sort", {"train.steps": 3, "objective.loss": "reinforce"}) == expected
    assert config.load("sort", [texts[0], {"objective": {"loss": "reinforce"}}]) == expected
    assert config.load("sort", texts[0]).train.steps == 3
    named = config.load("keywords", {"model": Path("some/run"), "train": {"micro_tokens": None}})
    assert named == config.load("keywords", ["model.name=some/run"])
    assert config.load("keywords", ["model=some/run"]) == named


def test_a_recipe_may_be_a_table():
    table = config.read_recipe("sort")
    assert config.load(table | {"name": "sort"}) == config.load("sort")
    assert config.load(table).name == "run"
    assert config.load({"task": "sort"}, {"seed": 3}).seed == 3
    assert config.load(config.RECIPES / "sort.toml") == config.load("sort")
    assert "did you mean 'train.steps'?" in refused(name={"train": {"step": 3}})
    assert "has no effect" in refused(name={"objective": {"kl": {"coefficient": 0.1}}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train": {"step": 3}}, "unknown setting 'train.step'; did you mean 'train.steps'?"),
        ({"steps": 3}, "unknown setting 'steps'; did you mean 'train.steps'?"),
        ({"train": 3}, "train must be a valid dictionary"),
        ({"model": 3}, "model must be a valid dictionary"),
    ],
)
def test_tables_are_refused_with_the_words_of_the_command_line(overrides, message):
    with pytest.raises(ConfigError) as caught:
        config.load("sort", overrides)
    assert message in str(caught.value)


def test_seed_and_overrides_win_over_the_recipe():
    recipe = config.load("sort", ["train.steps=7", "train.steps=8", {"seed": 5}])
    assert (recipe.train.steps, recipe.seed) == (8, 5)


def test_an_unknown_key_names_the_nearest():
    assert "unknown setting 'train.step'; did you mean 'train.steps'?" in refused("train.step=3")
    assert "did you mean 'train.learning_rate'?" in refused("train.learningrate=1")
    assert "did you mean 'rollout'?" in refused("rolout.batch=3")
    assert "there are name, description, seed, task, model" in refused("zzz=3")
    with pytest.raises(ConfigError, match=r"there is no recipe 'nowhere\.toml'"):
        config.load("nowhere.toml")


def test_an_unknown_name_names_the_nearest():
    message = refused("objective.loss=clipp")
    assert message.startswith("objective.loss.name must be reinforce or unclipped or clip or cispo")
    assert "did you mean 'clip'?" in message
    with pytest.raises(ConfigError, match="no recipe 'sorts'; did you mean 'sort'"):
        config.load("sorts")


def test_wrong_values_are_said_with_the_rule():
    assert refused("train.learning_rate=-1") == "train.learning_rate must be greater than 0, got -1"
    assert "train.steps must be a valid integer" in refused("train.steps=many")
    assert "rollout.temperature must be greater than 0, got 0" in refused("rollout.temperature=0")


def test_a_file_that_is_not_toml(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("a = = 3")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        config.load(str(file))


def test_a_setting_without_effect_is_refused_with_the_reason():
    message = refused("objective.advantage.eps=0.1")
    assert message == (
        "objective.advantage.eps has no effect with objective.advantage = 'group_mean'; remove it"
    )
    reinforce = "objective.loss=reinforce"
    for setting in ("objective.ratio=sequence", "objective.proximal=behavior"):
        assert 'has no effect with objective.loss.name = "reinforce"' in refused(reinforce, setting)
    in_reward = ["objective.kl=k1", "objective.kl.where=reward", "objective.proximal=behavior"]
    assert config.load("sort", [reinforce, *in_reward])
    assert "must be greater than 0" in refused("objective.kl=k3", "objective.kl.coefficient=0")
    assert "has no effect with objective.kl = 'none'" in refused("objective.kl.refresh=4")
    assert "finite" in refused("objective.kl=k3", "objective.kl.coefficient=inf")


def test_pieces_that_do_not_go_together_are_refused():
    assert "a gradient of mean 0" in refused("objective.kl=k1")


@pytest.mark.parametrize("name", ["pass_at_k", "max_at_k"])
def test_the_best_of_more_responses_than_a_group_has_is_refused(name):
    chosen, k = f"objective.advantage={name}", "objective.advantage.k={}"
    assert "objective.advantage.k is missing" in refused(chosen)
    least = {"pass_at_k": 1, "max_at_k": 2}[name]
    assert f"k must be greater than or equal to {least}" in refused(chosen, k.format(least - 1))
    message = refused(chosen, k.format(31))
    assert message.endswith("got 10; use a smaller objective.advantage.k, or more responses")


def test_gdpo_says_how_parts_are_given():
    message = refused("objective.advantage=gdpo")
    assert message.startswith("objective.advantage.parts needs a part of the grade and its weight")
    assert config.load("sort", ["objective.advantage=gdpo", "objective.advantage.parts.ordering=1"])


def planned(*overrides):
    return {
        key: told
        for _, lines in plan(config.load("sort", overrides), Path())
        for key, told in lines
    }


def test_the_plan_says_where_a_kl_in_the_reward_is_subtracted():
    kl = ["objective.kl=k1", "objective.kl.where=reward", "objective.kl.coefficient=0.5"]
    assert planned(*kl)["KL"].endswith("r_i ← r_i − 0.5 Σ_t k1_t")
    over_time = planned(*kl, "objective.advantage=reinforce_plus_plus")
    assert over_time["KL"].endswith("r_t ← r_t − 0.5 k1_t")


def test_the_plan_says_if_no_bound_on_the_ratio_acts():
    none = "the policy has not moved then: ρ = 1, no bound acts"
    assert planned("train.epochs=1")["gradient steps"].endswith(none)
    assert none not in planned("train.epochs=2")["gradient steps"]
    assert none not in planned("train.epochs=1", "objective.loss=reinforce")["gradient steps"]
    stale = ["loop.lag=1", "objective.proximal=behavior"]
    assert none not in planned("train.epochs=1", *stale)["gradient steps"]


def test_the_plan_says_how_an_importance_is_bounded():
    recompute = ["objective.proximal=recompute", "objective.importance.high=3"]
    cut = planned("objective.importance=truncate", *recompute)
    assert cut["importance"] == "v_t = clip(u_t, 0, 3),  u_t = π_prox / π_behavior"
    masked = planned("objective.importance=mask", "objective.importance.level=sequence", *recompute)
    assert masked["importance"] == (
        "v_t = u_t if 0 ≤ u_t ≤ 3, else 0,  u_t = product over the response of π_prox / π_behavior"
    )


def test_a_recipe_with_a_setting_without_effect_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[objective]\nloss = "reinforce"\nratio = "sequence"\n')
    with pytest.raises(ConfigError, match=r"objective\.ratio has no effect"):
        config.load(str(file), {"seed": 3})
    file.write_text('[objective.loss]\nname = "reinforce"\nlow = 0.1\n')
    with pytest.raises(ConfigError, match=r"loss\.low has no effect .* 'reinforce'"):
        config.load(str(file))


def test_a_piece_may_be_a_name_or_a_table(tmp_path):
    short = config.load("sort", ["objective.loss=cispo"]).objective
    assert short.loss == Cispo()
    file = tmp_path / "mine.toml"
    file.write_text('[objective.loss]\nname = "cispo"\ncap = 3\n')
    assert config.load(file).objective.loss == Cispo(cap=3)
    assert config.load(file, ["objective.loss.floor=1"]).objective.loss == Cispo(cap=3, floor=1)
    assert config.load(file, ["objective.loss=clip"]).objective.loss == Clip()


def test_what_an_override_replaces_takes_its_settings_along():
    recipe = config.load("sort", ["objective.loss=reinforce"])  # the recipe sets low
    assert config.effective(recipe)["objective"]["loss"] == {"name": "reinforce"}
    again = config.load("sort", ["objective.kl.coefficient=0.3", "objective.kl=k2"])
    assert again.objective.kl == KL(name="k2", coefficient=0.3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.batch=32"], "rollout.batch = 32 must be a multiple of train.batch = 30; use 60"),
        (["train.batch=15"], "train.batch = 15 must be a multiple of rollout.group_size = 10; use"),
        (["train.batch=20"], "rollout.batch = 30 must be a multiple of train.batch = 20; use 40"),
        (["rollout.group_size=1"], "use objective.advantage = 'raw'"),
        (["objective.loss=own"], "objective.loss.function is missing: 'own' needs it"),
        (
            ["objective.loss=cispo", "objective.loss.floor=6"],
            "objective.loss needs floor at or below cap, got 6 and 5",
        ),
        (
            ["objective.importance=mask", "objective.importance.low=3"],
            "objective.importance needs low at or below high, got 3 and 2",
        ),
        (["objective.importance=mask", "objective.proximal=behavior"], "it would always be 1"),
        (["train.decay_steps=9"], 'no effect with train.schedule = "constant"'),
        (["train.betas=[0.9, 1.0]"], "train.betas.1 must be less than 1"),
        (["train.log_kl_responses=2"], "no effect with train.log_kl = false"),
        (["train.learn=lora"], 'no effect with model.name = "sorter"'),
    ],
)
def test_numbers_that_do_not_fit_say_which_do(overrides, message):
    assert message in refused(*overrides)


def test_a_group_of_one_is_fine_for_raw_rewards():
    recipe = config.load("sort", ["rollout.group_size=1", "objective.advantage=raw"])
    assert recipe.prompts_per_rollout == 30
    assert config.load("sort", ["train.batch=10"]).gradient_steps_per_rollout == 30


def test_a_task_is_chosen_by_name_and_brings_its_own_settings():
    language = ["task.name=keywords", "model.name=smollm2-135m"]
    recipe = config.load("sort", [*language, "task.most=3"])
    assert recipe.task == KeywordsTask(most=3)
    assert config.load("sort", ["task.length=4"]).task == SortTask(length=4)
    assert Recipe.model_validate({"task": {"length": 4}}).task == SortTask(length=4)


def test_the_resolved_recipe_of_every_task_is_a_recipe(tmp_path):
    for overrides in (
        ["task.name=keywords", "task.must_end=true"],
        ["task.name=files", "task.train=a.jsonl", "task.validation=b.jsonl", "task.reward=r.py:f"],
    ):
        recipe = config.load("sort", ["model.name=smollm2-135m", *overrides])
        file = tmp_path / "again.toml"
        file.write_text(config.to_toml(config.effective(recipe)))
        assert config.load(str(file)) == recipe


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


def test_tasks_and_models_must_go_together():
    assert "does not go with model.name = 'sorter'" in refused("task.name=keywords")
    assert "does not go with model.name = 'smollm2-135m'" in refused("model.name=smollm2-135m")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.top_p=0.9"], "set rollout.truncated = true if it is meant"),
        (["train.micro_tokens=9", "train.micro_sequences=2"], "in sequences or in tokens"),
        (["rollout.min_tokens=70"], "rollout needs min_tokens at or below max_tokens, got 70 and"),
        (["device=gpu"], "device"),
        (["model.layers=3"], "model.layers has no effect with model = 'language'"),
    ],
)
def test_a_language_models_settings_are_checked(overrides, message):
    assert message in refused(*overrides, name="keywords")


def test_settings_of_a_language_model_have_no_effect_on_the_sorter():
    for setting in ("engine.kv_mb=10", "rollout.max_tokens=9", "device=cpu"):
        assert 'has no effect with model.name = "sorter"' in refused(setting)


def test_a_model_from_scratch_is_made_from_a_recipe(tmp_path):
    size = ["model.name=scratch", "model.layers=2", "model.width=64", "model.heads=4"]
    recipe = config.load("keywords", size)
    assert recipe.model == ScratchConfig(layers=2, width=64, heads=4)
    told = ("task", "keywords, reward = 'use', must_end = True")
    assert told in dict(plan(recipe, tmp_path))["task"]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_passes_over_a_rollout_are_planned(k, tmp_path):
    sets = [f"train.epochs={k}", "train.steps=42", "train.schedule=linear"]
    recipe = config.load("keywords", ["rollout.batch=64", "train.batch=64", *sets])
    lines = dict(dict(plan(recipe, tmp_path))["batches"])
    assert lines["gradient steps"].startswith(f"{k} per rollout = 1 train batch of 64 responses ×")
    assert f"2,688 responses sampled, {42 * k} gradient step" in lines["in all"]
    assert f"linear to 0 at gradient step {42 * k})" in lines["in all"]


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
    recipe = config.with_precision(config.load("keywords", given), "bf16")
    assert (recipe.train.precision, recipe.engine.precision) == found


SIZE = Size(1_000_000, cached=2 * 3 * 4 * 5, context=200, longest_prompt=30, copied=2)


def test_memory_and_disk_are_planned_part_by_part(tmp_path):
    sets = ["engine.kv_mb=1", "train.steps=42", "checkpoint.every=21"]
    recipe = config.with_precision(config.load("keywords", sets), "bf16")
    lines = dict(dict(plan(recipe, tmp_path, SIZE))["resources"])
    assert lines["memory"] == (
        "26 MB: fp32 masters 4 MB, gradients 4 MB, Adam's moments 8 MB, bf16 weights 2 MB, "
        "frozen copies (2) 4 MB, the engine's weights 4 MB"
    )
    assert lines["cache"] == "1 MB: 4,369 tokens (engine.kv_mb = 1) 1 MB"
    without = dict(dict(plan(recipe, tmp_path, SIZE._replace(copied=0)))["resources"])
    assert without["memory"].endswith("the engine's weights 2 MB")
    assert "2 checkpoints of 14 MB" in lines["disk"]


def test_what_does_not_learn_takes_no_memory(tmp_path):
    """10 of 20 layers of 40,000 weights learn: 400,000 have gradients and moments."""
    sets = ["train.learn=layers", "train.learn.last=10", "engine.kv_mb=1"]
    recipe = config.with_precision(config.load("keywords", sets), "fp32")
    size = SIZE._replace(layers=20, learned=400_000)
    sections = dict(plan(recipe, tmp_path, size))
    assert dict(sections["resources"])["memory"] == (
        "18 MB: fp32 masters 2 MB, gradients 2 MB, Adam's moments 3 MB, fp32 weights 2 MB, "
        "frozen copies (2) 3 MB, the engine's weights 6 MB"
    )
    assert dict(sections["batches"])["learning"] == "last 10 layers"


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ([], 0),
        (["train.log_kl=true"], 2),
        (["objective.kl=k3"], 1),
        (["train.log_kl=true", "objective.kl=k3"], 2),
        (["train.log_kl=true", "objective.kl=k3", "objective.kl.refresh=5"], 3),
    ],
)
def test_frozen_copies_are_those_the_learner_holds(overrides, copies):
    recipe = config.load("sort", overrides)
    counted = [need.what for need in needs(recipe, SIZE) if "frozen" in need.what]
    assert counted == [f"frozen copies ({copies})"] * (copies > 0)
    learner = build.build(sizes.settled(recipe)).learner
    learner.begin(0)
    held = {id(p) for p in (learner.reference, learner.initial, learner.previous) if p is not None}
    assert len(held) == copies


def test_a_pack_must_have_room_for_a_prompt(tmp_path, smollm2):
    tiny = ["model.name=scratch", f"model.tokenizer={smollm2}", "model.layers=1", "device=cpu"]
    recipe = config.load("keywords", [*tiny, "train.micro_tokens=64", "validation.max_tokens=64"])
    with pytest.raises(ConfigError, match=r"micro_tokens = 64 .*max_tokens = 64 leaves no room"):
        api.train(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_is_measured_from_its_files(smollm2):
    few = ["train.steps=1", "task.validation_prompts=9"]
    size = sizes.measure(config.load("keywords", [f"model.name={smollm2}", *few]))
    assert size[:3] == (134_515_008, 2 * 30 * 3 * 64, 8192)
    assert sizes.measure(config.load("sort")) is None
    assert sizes.measure(config.load("keywords", ["model.name=hf:no/such"])) is None


def test_a_files_setting_without_effect_is_refused_whatever_else_is_set():
    table = {"task": "sort", "model": "sorter", "train": {"decay_steps": 9}}
    for overrides in ([], ["seed=1"], ["train.learning_rate=1e-3"]):
        with pytest.raises(ConfigError, match=r"train\.decay_steps has no effect"):
            config.load(table, overrides)
    decayed = {**table, "train": {"schedule": "linear", "decay_steps": 9}}
    assert config.load(decayed, ["train.schedule=constant"]).train.schedule == "constant"


def test_the_constant_is_the_longest_response_unless_it_is_given():
    lengths = [
        config.load(recipe, ["objective.reduction=constant", *more]).objective.reduction.length
        for recipe, *more in (
            ("sort",),
            ("sums",),
            ("sums", "rollout.max_tokens=99"),
            ("sums", "objective.reduction.length=7"),
        )
    ]
    assert lengths == [3, 24, 99, 7]


@pytest.mark.parametrize("name", config.list_recipes(config.PRESETS))
def test_a_preset_goes_on_any_recipe(name):
    for recipe in ("sums", "keywords", "gsm8k"):
        loaded = config.load(recipe, [f"preset={name}"])
        assert config.effective(config.load(loaded)) == config.effective(loaded)
        assert loaded.description == config.load(recipe).description


def test_a_preset_overrides_the_recipe_and_set_overrides_both(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "dr-grpo"\n[objective]\nadvantage = "raw"\nratio = "sequence"\n')
    assert config.load(file).objective.advantage.name == "group_mean"
    changed = config.load(file, ["objective.advantage=leave_one_out", "objective.loss.high=0.3"])
    assert (changed.objective.advantage.name, changed.objective.ratio) == ("leave_one_out", "token")
    assert (changed.objective.loss.low, changed.objective.loss.high) == (0.2, 0.3)
    assert config.load(file, ["preset=gspo"]).objective.ratio == "sequence"


def test_a_presets_setting_without_effect_is_left_out_and_an_override_is_refused():
    recipe = config.load("sort", ["preset=gspo", "objective.loss=reinforce"])
    assert recipe.objective.ratio == "token"
    with pytest.raises(ConfigError, match=r"objective\.ratio has no effect with objective\.loss"):
        config.load("sort", ["preset=rloo", "objective.ratio=sequence"])
    with pytest.raises(ConfigError, match="there is no preset 'gspoo'; did you mean 'gspo'"):
        config.load("sort", ["preset=gspoo"])
