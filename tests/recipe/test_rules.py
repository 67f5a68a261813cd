"""Combinations of settings that can't work are rejected when the recipe is read."""

from typing import Any

import pytest

from burnish.errors import ConfigError
from burnish.recipe.load import (
    load_recipe,
)

STALE = {"objective.proximal": "behavior"}


def refused(*overrides, name="sort"):
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides)
    return str(caught.value)


def test_a_setting_without_effect_is_refused_with_the_reason():
    message = refused("objective.advantage.eps=0.1")
    assert message == (
        "objective.advantage.eps has no effect with objective.advantage = 'group_mean'; remove it"
    )
    reinforce = "objective.loss=reinforce"
    for setting in ("objective.ratio=sequence", "objective.proximal=behavior"):
        assert 'has no effect with objective.loss.name = "reinforce"' in refused(reinforce, setting)
    in_reward = ["objective.kl=k1", "objective.kl.where=reward", "objective.proximal=behavior"]
    assert load_recipe("sort", [reinforce, *in_reward])
    assert "must be greater than 0" in refused("objective.kl=k3", "objective.kl.coefficient=0")
    assert "has no effect with objective.kl = 'none'" in refused("objective.kl.refresh=4")
    assert "finite" in refused("objective.kl=k3", "objective.kl.coefficient=inf")


@pytest.mark.parametrize("name", ["pass_at_k", "max_at_k"])
def test_the_best_of_more_responses_than_a_group_has_is_refused(name):
    chosen, k = f"objective.advantage={name}", "objective.advantage.k={}"
    assert "objective.advantage.k is missing" in refused(chosen)
    least = {"pass_at_k": 1, "max_at_k": 2}[name]
    assert f"k must be greater than or equal to {least}" in refused(chosen, k.format(least - 1))
    message = refused(chosen, k.format(31))
    assert message.endswith(f"got 10; use objective.advantage.k = {8 + least}")


def test_a_recipe_with_a_setting_without_effect_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[objective]\nloss = "reinforce"\nratio = "sequence"\n')
    with pytest.raises(ConfigError, match=r"objective\.ratio has no effect"):
        load_recipe(str(file), {"seed": 3})
    file.write_text('[objective.loss]\nname = "reinforce"\nlow = 0.1\n')
    with pytest.raises(ConfigError, match=r"loss\.low has no effect .* 'reinforce'"):
        load_recipe(str(file))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.batch=32"], "train.batch = 30; use rollout.batch = 60"),
        (["train.batch=15"], "train.batch = 15 must be a multiple of rollout.group_size = 10; use"),
        (["train.batch=20"], "use train.batch = 10, or rollout.batch = 40"),
        (["rollout.group_size=1"], "use rollout.group_size = 2, or objective.advantage = 'raw'"),
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
        (
            ["objective.kl=k3", "objective.kl.ema=0.9", "objective.kl.refresh=4"],
            "is refreshed or a moving average, got refresh = 4 and ema = 0.9; remove one",
        ),
        (["objective.kl=k3", "objective.kl.ema=1"], "objective.kl.ema must be less than 1"),
        (["objective.kl.ema=0.9"], "objective.kl.ema has no effect with objective.kl = 'none'"),
        (
            ["objective.entropy=0.3"],
            "objective.entropy is a section, got 0.3; set its settings, such as "
            "objective.entropy.target",
        ),
        (["objective.entropy.delta=0.1"], "objective.entropy.target is missing"),
        (
            ["objective.entropy={target=1, low=0.1}"],
            "first coefficient, outside of entropy.low = 0.1 and entropy.high = 1; use "
            "entropy_coefficient = 0.1",
        ),
        (["train.decay_steps=9"], 'no effect with train.schedule = "constant"'),
        (["train.final_share=0.1"], 'no effect with train.schedule = "constant"'),
        (["train.schedule=cosine", "train.final_share=1"], "final_share must be less than 1"),
        (["train.weight_decay=-0.1"], "weight_decay must be greater than or equal to 0"),
        (["train.weight_decay=1e-6"], "train has weight_decay = 1e-06, which has no effect"),
        (["train.weight_decay=1e-6"], "use weight_decay = 6e-05 or more, or 0"),
        (["train.betas=[0.9, 1.0]"], "train.betas.1 must be less than 1"),
        (["train.log_kl_responses=2"], "no effect with train.log_kl = false"),
        (["train.learn=lora"], 'no effect with model.name = "sorter"'),
    ],
)
def test_numbers_that_do_not_fit_say_which_do(overrides, message):
    assert message in refused(*overrides)


LISTS = {
    "[]": "objective.importance is an empty list; use 'none', or a list of pieces",
    '["mask", "mask"]': "objective.importance has 'mask' per token twice; remove one",
    '["truncate", {name="mask", level="sequence"}]': (
        "weights each token by the ratio more than once, by 'truncate' per token and 'mask' per "
        "sequence; remove one of them, or use name = 'reject', whose weight is 0 or 1, for 'mask' "
        "per sequence"
    ),
    '["truncate", {name="mask", level="sequence"}, {name="reject", level="sequence"}]': (
        "or use name = 'reject', whose weight is 0 or 1, for 'truncate' per token"
    ),
    '["truncate", "none"]': "[1].name must be 'truncate', 'mask' or 'reject', got 'none'",
    '["truncate", {level="sequence"}]': "objective.importance[1].name is missing; add it",
    '["truncate", {name="reject", low=3}]': "importance[1] needs low at or below high, got 3 and 2",
    '["truncate", {name="reject", hihg=3}]': "'objective.importance[1].hihg'; did you mean 'high'?",
}


@pytest.mark.parametrize("given", LISTS)
def test_a_list_of_importance_corrections_is_checked(given):
    message = refused(f"objective.importance={given}", "objective.proximal=recompute")
    assert LISTS[given] in message


def test_a_setting_of_a_list_of_sections_is_refused():
    both = 'objective.importance=["truncate", {name="reject", level="sequence"}]'
    recipe = load_recipe("sort", [both])
    changed = ("sort", [both, "objective.importance.high=3"])
    for source, sets in (changed, (recipe, ["objective.importance.high=3"])):
        with pytest.raises(ConfigError, match=r"high has no effect.* is a list; change"):
            load_recipe(source, sets)
    assert load_recipe(recipe, "objective.importance=none").objective.corrections == ()
    assert len(load_recipe("sort", ["objective.importance=mask", both]).objective.corrections) == 2
    assert load_recipe("sort", [both, "objective.importance=mask"]).objective.importance.low == 0


def test_rejected_tokens_do_not_make_up_for_stale_ones():
    stale = ["loop.lag=1", "objective.proximal=recompute"]
    assert "need a ratio to the policy" in refused("objective.importance=reject", *stale)
    both = 'objective.importance=["reject", {name="truncate", level="geometric"}]'
    assert load_recipe("sort", [both, *stale])
    assert "it would always be 1" in refused(both, "objective.proximal=behavior")


def test_a_group_of_one_is_fine_for_raw_rewards():
    recipe = load_recipe("sort", ["rollout.group_size=1", "objective.advantage=raw"])
    assert recipe.prompts_per_rollout == 30
    assert load_recipe("sort", ["train.batch=10"]).gradient_steps_per_rollout == 30


def test_tasks_and_models_must_go_together():
    assert "does not go with model.name = 'sorter'" in refused("task.name=keywords")
    assert "does not go with model.name = 'smollm2-135m'" in refused("model.name=smollm2-135m")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.top_p=0.9"], "set rollout.truncated = true if this is intended"),
        (
            ["rollout.min_p=0.05", "rollout.repetition_penalty=1.1"],
            "rollout has min_p = 0.05 and repetition_penalty = 1.1, so tokens are drawn with other",
        ),
        (["rollout.min_p=1.5"], "rollout.min_p must be less than or equal to 1"),
        (["rollout.repetition_penalty=0"], "repetition_penalty must be greater than or equal to"),
        (["train.micro_tokens=9", "train.micro_sequences=2"], "in sequences or in tokens"),
        (["rollout.min_tokens=70"], "rollout needs min_tokens at or below max_tokens, got 70 and"),
        (["device=gpu"], "device"),
        (["model.layers=3"], "model.layers has no effect with model = 'language'"),
    ],
)
def test_a_language_models_settings_are_checked(overrides, message):
    assert message in refused(*overrides, name="keywords")


def test_settings_of_a_language_model_have_no_effect_on_the_sorter():
    sets = ("engine.kv_mb=10", "rollout.max_tokens=9", "device=cpu", "rollout.min_p=0.1")
    for setting in (*sets, "rollout.repetition_penalty=1.1"):
        assert 'has no effect with model.name = "sorter"' in refused(setting)


def test_a_files_setting_without_effect_is_refused_whatever_else_is_set():
    table = {"task": "sort", "model": "sorter", "train": {"decay_steps": 9}}
    for overrides in ([], ["seed=1"], ["train.learning_rate=1e-3"]):
        with pytest.raises(ConfigError, match=r"train\.decay_steps has no effect"):
            load_recipe(table, overrides)
    decayed = {**table, "train": {"schedule": "linear", "decay_steps": 9}}
    assert load_recipe(decayed, ["train.schedule=constant"]).train.schedule == "constant"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loop.lag": -1}, "loop.lag must be greater than or equal to 0, got -1"),
        ({"loop.lag": 1}, "objective.proximal = 'behavior'"),
        (
            {"buffer.capacity": 4, "buffer.order": "recent", "buffer.max_uses": 2} | STALE,
            "buffer has max_uses = 2, which has no effect with order = 'recent'",
        ),
        ({"buffer.capacity": 2} | STALE, "buffer.capacity = 2 is smaller than the 3 groups"),
        ({"loop": "free"} | STALE, "use runtime.name = 'ray'"),
        ({"loop": "free", "loop.window": 2, "runtime": "ray"} | STALE, "window = 2 is smaller"),
        ({"loop": "fre"}, "did you mean 'free'"),
        ({"runtime.generators": 2}, "runtime.generators has no effect with runtime = "),
        ({"loop": "free", "loop.lag": 2}, "loop.lag has no effect with loop = 'free'"),
    ],
)
def test_loops_that_cannot_work_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("sort", [settings])
    assert message in str(caught.value)


def test_a_train_batch_that_does_not_fit_names_sizes_that_fit():
    """7 of a rollout of 30 responses in groups of 10: the next multiple of 10 that divides 30. With
    a mesh of 4, and groups of 10, a train batch is a multiple of 20."""
    assert refused("train.batch=7").endswith("train.batch = 7; use train.batch = 10")
    said = refused("rollout.batch=32", "train.batch=7")
    assert said.endswith("use train.batch = 10 and rollout.batch = 40")
    on_mesh = ["runtime=torchrun", "mesh.shard=4", "rollout.group_size=8", "train.learn=all"]
    said = refused(*on_mesh, "rollout.batch=96", "train.batch=6", name="demo-small")
    assert said.endswith("rollout.group_size = 8; use train.batch = 8")
    assert load_recipe("demo-small", [*on_mesh, "rollout.batch=96", "train.batch=8"])


def test_all_broken_rules_and_settings_without_effect_are_reported_together():
    said = refused("train.batch=7", "loop=free", "mesh.shard=2").splitlines()
    assert [line.partition(" ")[0] for line in said] == [
        *("rollout.batch", "loop.name", "the", "mesh.shard"),
    ]


def test_names_of_trackers():
    assert load_recipe("sort", ["log.trackers=wandb"]).log.trackers == ["wandb"]
    twice = 'log.trackers=["wandb", "mlflow", "wandb"]'
    assert load_recipe("sort", [twice]).log.trackers == ["wandb", "mlflow"]
    assert "log.group has no effect" in refused("log.group=g", "log.trackers=tensorboard")
    assert "log.samples" in refused("log.trackers=wandb", "log.samples=3", name="sft")
    assert load_recipe("sft", ["log.trackers=wandb", "log.group=g"])


def test_a_run_without_a_reward_ends_early_only_by_a_named_metric():
    taught = {
        "task": {"name": "files", "train": "rows.jsonl", "reward": "none"},
        "model": "smollm2-135m",
        "teacher": {"model": "smollm2-135m"},
        "objective": {"advantage": "teacher"},
    }
    with pytest.raises(ConfigError, match=r"set validation\.metric, such as 'validation/length'"):
        load_recipe(taught, ["validation.patience=3"])
    remedy = ["validation.patience=3", "validation.metric=validation/length"]
    assert load_recipe(taught, remedy).target_metric == "validation/length"


AGENT = ["task.name=agent", "task.agent=agent.py:run", "task.train=rows.jsonl"]
TASKSET = ["task.name=verifiers", "task.taskset=letters.py"]


@pytest.mark.parametrize(
    ("advantage", "setting"),
    [
        (["objective.advantage=remax"], "objective.advantage = 'remax'"),
        (["objective.advantage=vine"], "objective.advantage = 'vine'"),
        (["objective.advantage=turn_mean"], "objective.advantage = 'turn_mean'"),
    ],
)
@pytest.mark.parametrize(("task", "name"), [(AGENT, "agent"), (TASKSET, "verifiers")])
@pytest.mark.parametrize(("size", "other"), [(8, "group_mean"), (1, "raw")])
def test_agents_name_the_advantage_that_they_do_not_support(
    task, name, advantage, setting, size, other
):
    """The remedy fits the group size."""
    given = [*task, f"rollout.group_size={size}", "rollout.batch=64", "train.batch=64"]
    with pytest.raises(ConfigError) as raised:
        load_recipe("keywords", [*given, *advantage])
    (said,) = (line for line in str(raised.value).splitlines() if name in line)
    assert setting in said
    assert f"task.name = '{name}'" in said
    assert said.endswith(f"; use objective.advantage = '{other}'")
    assert load_recipe("keywords", [*given, f"objective.advantage={other}"]).task.name == name
