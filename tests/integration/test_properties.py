"""Invariants of random recipes: settings are tested together, not one by one.

Each test draws recipes from numbered seeds; a failure names its seed and its settings, and
``BURNISH_SEED=17`` runs that seed alone. The recipes train the sorting model and a tiny transformer
on a mixture of two tasks with scales, so that advantages, losses, length penalties, selection,
overlong responses, teachers, critics, buffers and lag meet.
"""

import dataclasses
import itertools
import os
import random
from functools import partial
from string import ascii_lowercase
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from burnish import api
from burnish.errors import ConfigError
from burnish.launch import local
from burnish.launch.resolve import resolve
from burnish.launch.settings import rollout_settings
from burnish.learner.program import compile, critic_loss
from burnish.model import checkpoint
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe import length, selection
from burnish.recipe.load import flatten, load_recipe
from burnish.recipe.objective import advantages, kl, losses, objective
from burnish.recipe.objective.entropy import EntropyTarget
from burnish.recipe.runtime import BufferConfig
from burnish.rollout.dead_groups import fill
from burnish.rollout.greedy_baseline import set_apart
from burnish.rollout.packing import Pack, pack
from burnish.rollout.rollout import drop_errors
from burnish.runs.metrics import Timers
from burnish.types import Finish, Grade, Measured, Scores
from tests.conftest import byte_tokenizer, make_group
from tests.loops.test_recorder import fingerprint, one_thread, stopper  # noqa: F401

pytestmark = pytest.mark.slow


def seeds(count):
    """The numbers of the recipes that a test draws."""
    chosen = os.environ.get("BURNISH_SEED")
    return [int(chosen)] if chosen else range(count)


# Recipes -----------------------------------------------------------------------------------------


def score(response, row):
    """Two parts that vary between random responses; the first decides what is correct."""
    even, third = float(len(response) % 2 == 0), float(sum(map(ord, response)) % 3 == 0)
    return {"reward": even + 0.5 * third, "even": even, "third": third, "correct": even == 1}


def value_of(batch):
    """A critic from a script: half a point before every token."""
    return torch.full_like(batch.behavior_logprobs, 0.5)


def own_advantage(rewards, groups):
    return rewards - rewards.mean()


def own_advantage_raw(rewards, groups):
    return rewards


def own_loss(logprobs, old_logprobs, advantages):
    return -advantages * logprobs


def own_loss_squared(logprobs, old_logprobs, advantages):
    return -advantages * logprobs + 0.1 * logprobs**2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of a student and a teacher that read bytes."""
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, layers) in enumerate([("student", 2), ("teacher", 1)]):
        shape = {"vocab_size": 256, "d_model": 16, "n_heads": 2, "d_ff": 24, "context": 128}
        model = Transformer(ModelConfig(n_layers=layers, init_std=0.3, **shape)).init_weights(seed)
        (folder / name).mkdir()
        checkpoint.save_model(model, folder / name)
        byte_tokenizer().save(folder / name)
    return folder


def part(name):
    """A task of rows; a partial function is called in this process, without workers."""
    rows = [{"prompt": f"{name}{n}"} for n in range(12)]
    return {
        "name": "files",
        "rows": rows,
        "function": partial(score),
        "validation_rows": 1,
        "chat": False,
    }


def transformer(models, **settings):
    """A recipe of the tiny transformer on a mixture; ``settings`` by their whole names."""
    base = {
        "task": {"name": "mixture", "weights": {"x": 1.0, "y": 1.0},
                 "tasks": {"x": part("x"), "y": part("y")}},
        "model.name": str(models / "student"), "device": "cpu", "rollout.batch": 16,
        "rollout.group_size": 4, "rollout.max_tokens": 12, "rollout.stop": list(ascii_lowercase),
        "train.batch": 8, "train.steps": 3, "train.epochs": 1, "train.learning_rate": 3e-3,
        "train.precision": "fp32", "validation.every": 100, "objective.loss.low": 0.2,
        "objective.loss.high": 0.2,
    }  # fmt: skip
    if settings.get("objective.loss.name", "clip") not in ("clip", "gmpo", "dppo"):
        del base["objective.loss.low"], base["objective.loss.high"]
    return load_recipe("sort", [base | settings])


def sorter(**settings):
    base = {
        "rollout.batch": 24, "rollout.group_size": 4, "train.batch": 12, "train.steps": 4,
        "train.epochs": 1, "train.learning_rate": 3e-2, "validation.every": 2,
        "checkpoint.every": 1, "task.prompts": 6,
    }  # fmt: skip
    return load_recipe("sort", [base | settings])


GROUPED = {
    "group_mean": {}, "group_zscore": {}, "leave_one_out": {}, "best_of_group": {"centered": True},
    "batch_std": {}, "pass_at_k": {"k": 2}, "max_at_k": {"k": 2}, "maxrl": {},
    "gdpo": {"parts": {"even": 1.0, "third": 0.5}}, "opo": {}, "remax": {}, "vine": {"steps": 3},
    "reinforce_plus_plus_baseline": {},
}  # fmt: skip
"""Advantages with a group or greedy baseline, each with settings that it needs."""
SCALED = {
    "raw": {}, "group_mean": {}, "leave_one_out": {}, "best_of_group": {}, "max_at_k": {"k": 2},
    "opo": {}, "remax": {}, "vine": {"steps": 3},
}  # fmt: skip
"""Advantages that are multiplied by the scale of the rewards."""
UNSCALED = {"group_zscore": {}, "pass_at_k": {"k": 2}, "maxrl": {}}
"""Advantages that a scale does not change, up to eps."""
BY_BATCH = {"batch_std": {}, "reinforce_plus_plus": {}, "reinforce_plus_plus_baseline": {}}
"""Advantages that are normalised over the batch."""
PENALTIES = [
    {"length.name": "none"},
    {"length.name": "overlong", "length.buffer": 4, "length.coefficient": 0.5},
    {"length.name": "target", "length.tokens": 5, "length.coefficient": 0.05},
    {"length.name": "at_most", "length.tokens": 8, "length.coefficient": 0.05},
    {"length.name": "among_correct"},
    {"length.name": "solve_rate"},
]


def draw_recipe(rng, models, kinds, **fixed):
    """A valid recipe of random settings around an advantage of ``kinds``; and the settings."""
    while True:
        name = rng.choice(sorted(kinds))
        chosen = {"objective.advantage": {"name": name, **kinds[name]}}
        chosen |= rng.choice(PENALTIES)
        chosen["rollout.overlong"] = rng.choice(["keep", "mask", "drop"])
        chosen["selection.dead_groups"] = rng.choice(["keep", "drop"])
        chosen["selection.dead_by"] = rng.choice(["advantage", "correct"])
        chosen["objective.loss.name"] = rng.choice(["clip", "reinforce", "unclipped", "cispo"])
        reduction = rng.choice(["sequence_mean", "token_mean", "prompt_mean", "constant"])
        chosen["objective.reduction"] = reduction
        try:
            return transformer(models, **chosen | fixed), chosen | fixed
        except ConfigError:
            continue  # settings that have no effect together are refused


# Groups ------------------------------------------------------------------------------------------


def random_group(rng, recipe, index, *, equal=False, scale=1.0):
    """A graded group as a rollout makes it: with its length penalty, and its greedy baseline set
    apart. ``equal``: all responses are the same."""
    graded = graded_group(rng, recipe, index, equal=equal, scale=scale)
    return set_apart(rollout_settings(recipe).penalize(graded))


def graded_group(rng, recipe, index, *, equal=False, scale=1.0):
    """A group as its task graded it, with a greedy response and step values if the recipe reads
    them. Whether a response is correct does not follow from its reward."""
    advantage, size = recipe.objective.advantage, rng.randint(3, 5)
    limit = recipe.rollout.max_tokens

    def draw():
        return [rng.choice([rng.randint(1, limit), limit]), rng.random() < 0.3,
                rng.choice([0.0, 1.0, 1.5]), rng.random() < 0.5]  # fmt: skip

    one = draw()
    drawn = [one if equal else draw() for _ in range(size + 1)]
    tokens = [[7] * length for length, *_ in drawn]
    sampled = [[not (is_forced and 0 < t < 3) for t in range(n)] for n, is_forced, *_ in drawn]
    rewards, correct = ([each[i] for each in drawn] for i in (2, 3))
    group = make_group(index, [1, 2], tokens, rewards, sampled=sampled)
    grades, completions = [], []
    for (completion, grade), is_correct in zip(group.graded, correct, strict=True):
        even, third = min(grade.reward, 1.0), float(grade.reward == 1.5)
        parts = {"even": even, "third": third}
        if advantage.name == "maxrl":  # a penalty of correct responses must leave them above 0
            is_correct = is_correct and grade.reward >= 1
        grades.append(Grade(grade.reward, parts, correct=is_correct))
        is_cut = len(completion.token_ids) == limit
        completion = dataclasses.replace(
            completion, finish=Finish.LENGTH if is_cut else Finish.STOP
        )
        if advantage.name == "vine":
            values = np.full(len(completion.token_ids), np.nan, dtype=np.float32)
            values[0] = grade.reward if equal else rng.choice([0.0, 0.5, 1.0])
            if len(values) > 3 and completion.sampled[3]:
                values[3] = grade.reward if equal else rng.choice([0.0, 0.5, 1.0])
            completion = dataclasses.replace(completion, values=values)
        completions.append(completion)
    if advantage.name == "remax":
        params = dataclasses.replace(completions[-1].params, temperature=0.0)
        completions[-1] = dataclasses.replace(completions[-1], params=params)
    else:
        completions, grades = completions[:-1], grades[:-1]
    prompt = dataclasses.replace(group.prompt, scale=scale)
    return dataclasses.replace(
        group, prompt=prompt, completions=tuple(completions), grades=tuple(grades)
    )


def estimated(recipe, groups):
    """Advantages [N] of the actions, and the batch."""
    kept, _ = drop_errors(groups, recipe.rollout.overlong)
    program = compile(recipe.objective, recipe.critic)
    batch = pack(kept, program.graded)
    return program.advantages(batch, Scores()), batch


@pytest.mark.parametrize("seed", seeds(120))
def test_equal_responses_have_no_advantage(seed, models):
    rng = random.Random(seed)
    recipe, settings = draw_recipe(rng, models, GROUPED)
    groups = [random_group(rng, recipe, i, equal=True, scale=rng.choice([0.5, 1, 2.0]))
              for i in range(3)]  # fmt: skip
    kept, _ = drop_errors(groups, recipe.rollout.overlong)
    if not kept:
        return
    found, _ = estimated(recipe, groups)
    assert not found.any(), (seed, settings)
    assert all(map(rollout_settings(recipe).is_dead, kept)), (seed, settings)
    if recipe.selection.dead_groups == "drop":
        assert fill(rollout_settings(recipe), groups, lambda count: []).groups == []


@pytest.mark.parametrize("seed", seeds(120))
def test_a_group_is_dead_if_and_only_if_it_has_no_advantage(seed, models):
    rng = random.Random(seed)
    own = {"own": {"function": own_advantage_raw}}
    kinds = GROUPED | SCALED | own
    del kinds["reinforce_plus_plus_baseline"]  # whitening moves dead groups by the batch's mean
    recipe, settings = draw_recipe(rng, models, kinds, **{"selection.dead_by": "advantage"})
    groups = [random_group(rng, recipe, i, equal=rng.random() < 0.3) for i in range(6)]
    kept, _ = drop_errors(groups, recipe.rollout.overlong)
    if not kept:
        return
    found, batch = estimated(recipe, kept)
    is_dead = rollout_settings(recipe).is_dead
    for place, group in enumerate(kept):
        own = found[batch.group_ids[batch.sample_ids] == place]
        assert is_dead(group) == (not own.any()), (seed, place, settings)


@pytest.mark.parametrize("seed", seeds(120))
def test_a_scale_multiplies_the_advantages_of_its_task_alone(seed, models):
    rng = random.Random(seed)
    recipe, settings = draw_recipe(rng, models, SCALED | UNSCALED, **{"length.name": "none"})
    if rng.random() < 0.5 and recipe.objective.advantage.name not in ("vine", "maxrl"):
        recipe, settings = transformer(models, **settings | rng.choice(PENALTIES[1:])), settings
    groups = [random_group(rng, recipe, i) for i in range(4)]
    scale = rng.choice([0.25, 3.0])
    scaled = [
        dataclasses.replace(g, prompt=dataclasses.replace(g.prompt, scale=scale)) if i % 2 else g
        for i, g in enumerate(groups)
    ]
    kept, _ = drop_errors(groups, recipe.rollout.overlong)
    if not kept:
        return
    found, batch = estimated(recipe, groups)
    other, _ = estimated(recipe, scaled)
    odd = torch.tensor([g.index % 2 == 1 for g in kept])[batch.group_ids[batch.sample_ids]]
    is_scaled = recipe.objective.advantage.name in SCALED
    factor = torch.where(odd, scale if is_scaled else 1.0, 1.0)
    torch.testing.assert_close(other, factor * found, rtol=2e-4, atol=1e-5, msg=str(settings))


def penalised(recipe, group):
    """The rewards of a graded group after its length penalty, in plain Python; [G], or [G + 1] with
    a greedy response."""
    told, limit = recipe.length, recipe.rollout.max_tokens
    has_greedy = recipe.objective.advantage.name == "remax"
    rows = []
    for place, (completion, grade) in enumerate(group.graded):
        is_greedy = has_greedy and place == len(group.grades) - 1
        dropped = recipe.rollout.overlong == "drop" and completion.finish is Finish.LENGTH
        length = sum(map(bool, completion.sampled))
        room = limit - (len(completion.token_ids) - length)
        rows.append((grade.reward, grade.correct, length, room, not is_greedy and not dropped))
    right = [length for _, ok, length, _, counts in rows if ok and counts]
    rates = [ok for _, ok, _, _, counts in rows if counts]
    found = []
    for reward, ok, length, room, _ in rows:
        if told.name == "overlong":
            late = (length - (room - told.buffer)) / told.buffer
            reward -= told.coefficient * min(1, max(0, late))
        elif told.name == "target":
            reward -= told.coefficient * abs(told.tokens - length)
        elif told.name == "at_most":
            reward *= min(1, max(0, told.coefficient * (told.tokens - length) + told.delta))
        elif told.name == "among_correct" and ok:
            std = np.std(right) if right else 0
            away = (length - np.mean(right)) / std if std else 0
            reward -= told.coefficient / (1 + np.exp(-away))
        elif told.name == "solve_rate" and rates:
            rate = max(np.mean(rates), 1 / len(rates))
            reward -= told.coefficient * rate * length / limit
        found.append(reward)
    return found


def z_scores(values):
    std = np.std(values, ddof=1)
    return [(x - np.mean(values)) / (std + 1e-6) if std > 1e-9 else 0.0 for x in values]


def best_of_sets(rewards, k):
    """How much the best of k gains if response i is drawn, in stds of the best; by all sets."""
    k = min(k, len(rewards) - 1)
    best = {
        own: max(rewards[i] for i in own) for own in itertools.combinations(range(len(rewards)), k)
    }
    values = list(best.values())
    mean, std = np.mean(values), np.std(values)
    gains = [np.mean([v for own, v in best.items() if i in own]) for i in range(len(rewards))]
    return [(gain - mean) / (std + 1e-6) for gain in gains]


def gain_in_sets(rewards, k):
    k, every = min(k, len(rewards)), range(len(rewards))
    sets = list(itertools.combinations(every, k))
    gain = [0.0] * len(rewards)
    for own in sets:
        for i in own:
            others = max(rewards[j] for j in own if j != i)
            gain[i] += (max(rewards[j] for j in own) - others) / len(sets)
    return gain


def plain(recipe, groups):
    """The advantage of each response that is kept, in plain Python from the task's grades, by the
    group's number and the response's place in it."""
    advantage, found, tokens = recipe.objective.advantage, {}, {}
    overlong, name = recipe.rollout.overlong, advantage.name
    for group in groups:
        scale = group.prompt.scale
        rewards = [scale * reward for reward in penalised(recipe, group)]
        pairs = [(reward, *pair) for reward, pair in zip(rewards, group.graded, strict=True)]
        greedy = pairs.pop()[0] if name == "remax" else None
        cut = [c.finish is Finish.LENGTH for _, c, _ in pairs]
        pairs = [
            p for p, is_cut in zip(pairs, cut, strict=True) if not (overlong == "drop" and is_cut)
        ]
        in_loss = [not (overlong == "mask" and c.finish is Finish.LENGTH) for _, c, _ in pairs]
        if len(pairs) < min(2, len(group.grades)) or not any(in_loss):
            continue
        own, lengths = [r for r, *_ in pairs], [int(c.sampled.sum()) for _, c, _ in pairs]
        mean = np.mean(own)
        if name == "raw":
            values = own
        elif name in ("group_mean", "batch_std", "reinforce_plus_plus_baseline"):
            values = [r - mean for r in own]
        elif name == "reinforce_plus_plus":
            values = own
        elif name == "group_zscore":
            values = z_scores(own)
        elif name == "leave_one_out":
            values = [r - (sum(own) - r) / (len(own) - 1) for r in own]
        elif name == "best_of_group":
            values = [(r - mean if advantage.centered else r) if r == max(own) else 0 for r in own]
        elif name == "maxrl":
            values = [(r - mean) / (mean + 1e-6) if r != mean else 0 for r in own]
        elif name == "pass_at_k":
            values = best_of_sets(own, advantage.k)
        elif name == "max_at_k":
            values = gain_in_sets(own, advantage.k)
        elif name == "opo":
            weighted = np.dot(lengths, own) / sum(lengths)
            values = [r - weighted for r in own]
        elif name == "remax":
            values = [r - greedy for r in own]
        else:
            assert name == "gdpo", name
            parts = [[scale * grade.parts[part] for *_, grade in pairs] for part in advantage.parts]
            weights = advantage.parts.values()
            scores = [[w * z for z in z_scores(p)] for w, p in zip(weights, parts, strict=True)]
            values = [sum(column) for column in zip(*scores, strict=True)]
        for place, value in enumerate(values):
            found[group.index, place] = value
            tokens[group.index, place] = lengths[place] * in_loss[place]
    every = list(found.values())
    if name in ("batch_std", "gdpo"):
        std = np.std(every, ddof=1)
        found = {key: x / (std + 1e-6) for key, x in found.items()}
    if name.startswith("reinforce"):
        over = [x for key, x in found.items() for _ in range(tokens[key])]
        std = np.sqrt(np.var(over, ddof=1) + 1e-8) if len(over) > 1 else 1.0
        found = {key: (x - np.mean(over)) / std for key, x in found.items()}
    return found


@pytest.mark.parametrize("seed", seeds(300))
def test_advantages_equal_a_plain_reference(seed, models):
    """From the task's grades, through penalties, overlong responses and scales."""
    rng = random.Random(seed)
    kinds = {k: v for k, v in (GROUPED | SCALED | BY_BATCH).items() if k != "vine"}
    recipe, settings = draw_recipe(rng, models, kinds)
    graded = [graded_group(rng, recipe, i, scale=rng.choice([0.5, 1, 3.0])) for i in range(4)]
    expected = plain(recipe, graded)
    if len(expected) < 2:
        return
    found, batch = estimated(
        recipe, [set_apart(rollout_settings(recipe).penalize(group)) for group in graded]
    )
    is_whitened = recipe.objective.advantage.name.startswith("reinforce")
    if is_whitened and batch.is_action.sum() < 2:
        return
    assert len(batch.rewards) == len(expected), (seed, settings)
    for place, (key, value) in enumerate(expected.items()):
        own = found[(batch.sample_ids == place) & batch.is_action]
        told = f"seed {seed}, response {key}, {settings}"
        torch.testing.assert_close(
            own, torch.full_like(own, float(value)), rtol=2e-3, atol=2e-4, msg=told
        )


@pytest.mark.parametrize("seed", seeds(60))
def test_correctness_decides_as_in_dapo(seed, models):
    """Which groups are dead by correctness follows from the task's grades, whatever penalties and
    scales make of the rewards; dropped responses do not count."""
    rng = random.Random(seed)
    kinds = {k: v for k, v in GROUPED.items() if k != "vine"}
    fixed = {"selection.dead_by": "correct", "selection.dead_groups": "drop"}
    recipe, settings = draw_recipe(rng, models, kinds, **fixed)
    groups = [random_group(rng, recipe, i, scale=0.5) for i in range(6)]
    alive = []
    for group in groups:
        own = [
            grade.correct
            for completion, grade in group.graded
            if not (recipe.rollout.overlong == "drop" and completion.finish is Finish.LENGTH)
        ]
        masked = recipe.rollout.overlong == "mask"
        if masked and all(c.finish is Finish.LENGTH for c in group.completions):
            continue
        if len(own) >= 2 and 0 < sum(own) < len(own):
            alive.append(group.index)
    found = fill(rollout_settings(recipe), groups, lambda count: [])
    assert [group.index for group in found.groups] == alive, (seed, settings)


@pytest.mark.parametrize("seed", seeds(60))
def test_masked_and_inserted_tokens_have_no_weight(seed, models):
    """Log-probabilities, entropies, references and values of such tokens change no term."""
    rng = random.Random(seed)
    kinds = GROUPED | SCALED | {"gae": {}}
    del kinds["vine"]
    chosen = {"rollout.overlong": "mask", "selection.dead_groups": "keep"}
    chosen |= {"objective.kl": {"name": "k3", "coefficient": 0.1},
               "objective.entropy_coefficient": 0.1}  # fmt: skip
    name = rng.choice(sorted(kinds))
    chosen["objective.advantage"] = {"name": name, **kinds[name]}
    chosen["objective.reduction"] = rng.choice(["sequence_mean", "token_mean", "prompt_mean"])
    if name == "gae":
        chosen["critic.shared"] = rng.random() < 0.5
    recipe = transformer(models, **chosen)
    groups = [random_group(rng, recipe, i) for i in range(3)]
    kept, _ = drop_errors(groups, "mask")
    if not kept:
        return
    program = compile(recipe.objective, recipe.critic)
    batch, torch_rng = pack(kept, program.graded), torch.Generator().manual_seed(seed)
    streams = torch.randn(6, len(batch.tokens), generator=torch_rng, dtype=torch.float64)
    moved = torch.where(batch.is_action, streams, streams + 1.0)

    def terms_of(given):
        policy, entropy, proximal, reference, values, old = given
        scores = Scores(proximal, reference, None, old if recipe.critic else None)
        found = program.advantages(batch, scores)
        (learn,) = program.batches(batch, found, scores, [Pack.whole(batch)])
        loss = program.token_loss(Measured(policy, entropy), learn)
        assert not learn.loss_weight[~batch.is_action].any()
        total = [(learn.loss_weight * loss)[batch.is_action].sum(), found[batch.is_action].sum()]
        total.append(torch.where(learn.loss_weight == 0, 0.0, learn.loss_weight * loss).sum())
        if recipe.critic:
            value = critic_loss(program.critic, values, learn)
            total.append(torch.where(learn.loss_weight == 0, 0.0, learn.loss_weight * value).sum())
        return torch.stack([t.double() for t in total])

    assert torch.equal(terms_of(streams), terms_of(moved)), (seed, chosen)


EVERY = [
    *({"name": name, **settings} for name, settings in (GROUPED | SCALED | BY_BATCH).items()),
    {"name": "max_at_k", "k": 2, "eps": 1e-6},
    {"name": "gdpo", "parts": {"even": 1.0, "length": 1.0}},
    {"name": "gae", "values": value_of},
    {"name": "own", "function": own_advantage},
    {"name": "teacher"},
    {"name": "teacher", "reward": 0.5},
]
"""Advantages of every kind."""


def taught(recipe, groups, seed):
    """Advantages [N], with random log-probabilities of the policy and the teacher."""
    kept, _ = drop_errors(groups, recipe.rollout.overlong)
    program = compile(recipe.objective, recipe.critic)
    batch, rng = pack(kept, program.graded), torch.Generator().manual_seed(seed)
    proximal, teacher = torch.randn(2, len(batch.tokens), generator=rng)
    return program.advantages(batch, Scores(proximal, None, teacher))


def accepted(models, **settings):
    """The recipe, or None if burnish refuses it."""
    if settings["objective.advantage"]["name"] == "teacher":
        settings["teacher.model"] = str(models / "teacher")
    try:
        return transformer(models, **settings)
    except ConfigError:
        return None


def name_of(settings):
    return "-".join(str(getattr(one, "__name__", one)) for one in settings.values())[:40]


@pytest.mark.parametrize("advantage", EVERY, ids=name_of)
def test_scales_and_penalties_are_accepted_if_and_only_if_they_have_an_effect(advantage, models):
    """Refused settings change no advantage beyond eps; accepted ones do."""
    base = {"objective.advantage": advantage}
    if "length" in advantage.get("parts", {}):
        base |= PENALTIES[2]
    recipe, rng = accepted(models, **base), random.Random(5)
    assert recipe is not None
    graded = [graded_group(rng, recipe, i) for i in range(8)]
    own = [set_apart(rollout_settings(recipe).penalize(group)) for group in graded]
    found = taught(recipe, own, 0)
    scaled = [
        dataclasses.replace(g, prompt=dataclasses.replace(g.prompt, scale=3.0)) if i % 2 else g
        for i, g in enumerate(own)
    ]
    is_changed = not torch.allclose(taught(recipe, scaled, 0), found, rtol=1e-3, atol=1e-3)
    assert is_changed == (accepted(models, **base, **{"task.scales.x": 3.0}) is not None)
    if "length.name" in base:
        return
    for penalty in PENALTIES[1:]:
        other = accepted(models, **base | penalty)
        shape = rollout_settings(transformer(models, **penalty)).penalize
        shaped = [set_apart(shape(group)) for group in graded]
        if advantage["name"] == "maxrl" and other is None:
            continue  # it refuses rewards below 0
        if advantage["name"] == "vine":
            assert other is None  # steps are valued by the task's reward alone
            continue
        is_changed = not torch.equal(taught(recipe, shaped, 0), found)
        assert is_changed == (other is not None), penalty


# Runs --------------------------------------------------------------------------------------------


def numbers(recipe):
    """All metrics and advantages of a run, step by step."""
    parts = local.build_local(resolve(recipe))
    try:
        steps = list(parts.train(timers=Timers(), start=0))
    finally:
        parts.close()
    return [(dict(s.metrics), [round(a, 9) for a in s.advantages]) for s in steps]


STALE = {"objective.proximal": "behavior", "objective.loss.name": "clip"}


@pytest.mark.parametrize("seed", seeds(14))
def test_stopped_and_resumed_equals_one_run(seed, tmp_path):
    rng = random.Random(seed)
    while True:
        chosen = {
            "objective.advantage": rng.choice([
                "group_mean", "group_zscore", "batch_std", "opo", "remax", "raw", "maxrl",
                {"name": "pass_at_k", "k": 2}, {"name": "gdpo", "parts": {"ordering": 1.0}},
            ]),
            "selection.dead_groups": rng.choice(["keep", "drop", "dynamic", "active"]),
            "selection.dead_by": rng.choice(["advantage", "correct"]),
            "objective.kl": rng.choice(["none", {"name": "k3"}, {"name": "k1", "where": "reward"}]),
            "loop.lag": rng.choice([0, 1, 2]),
        }  # fmt: skip
        if chosen["selection.dead_groups"] in ("dynamic", "active"):
            chosen["selection.on_bound"] = "learn"
        if rng.random() < 0.5:
            order = rng.choice(["uniform", "weighted", "recent"])
            chosen |= {"buffer.capacity": rng.choice([8, 12]), "buffer.order": order,
                       "buffer.max_uses": 1 if order == "recent" else 2}  # fmt: skip
        if rng.random() < 0.3:
            chosen["selection.target"] = 0.5
        if chosen["loop.lag"] or "buffer.capacity" in chosen:
            chosen |= STALE
        try:
            sorter(**chosen)
            break
        except ConfigError:
            continue
    recipe = sorter(**chosen)
    api.train(recipe, out=tmp_path / "whole", show=False)
    api.train(recipe, out=tmp_path / "cut", show=False, stop=stopper(2))
    api.resume(tmp_path / "cut", show=False)
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "cut"), (seed, chosen)


@pytest.mark.parametrize("seed", seeds(6))
def test_micro_batches_change_nothing_beyond_rounding(seed, models):
    rng = random.Random(seed)
    kinds = {k: v for k, v in (GROUPED | SCALED).items() if k != "vine"}
    fixed = {"train.steps": 2, "selection.dead_groups": "keep"}
    recipe, settings = draw_recipe(rng, models, kinds, **fixed)
    whole = numbers(recipe)
    for micro in ({"train.micro_sequences": 3}, {"train.micro_tokens": 40}):
        found = numbers(transformer(models, **settings | micro))
        for (metrics, own), (expected, theirs) in zip(found, whole, strict=True):
            assert own == pytest.approx(theirs, abs=1e-4), (seed, settings)
            assert metrics == pytest.approx(expected, rel=2e-3, abs=2e-5), (seed, settings)


# Every setting has an effect ---------------------------------------------------------------------

MANY = {"train.epochs": 3, "train.learning_rate": 3e-2}
"""Several gradient steps that move the policy far enough to be clipped."""
LAG = {"loop.lag": 1, **STALE}
REPLAY = {"buffer.capacity": 8, "buffer.max_uses": 3, **STALE, "train.steps": 5}
TRUNCATE = {"objective.importance": {"name": "truncate"}, "loop.lag": 1, **MANY}
DROP = {"selection.dead_groups": "drop", "objective.advantage": "group_mean", "train.steps": 6}


def piece(kind, name, **settings):
    return {f"objective.{kind}": {"name": name, **settings}}


EFFECTS = {
    "objective.advantage.group_zscore.eps": ({}, piece("advantage", "group_zscore"), 0.5),
    "objective.advantage.best_of_group.centered": ({}, piece("advantage", "best_of_group"), True),
    "objective.advantage.batch_std.of": ({}, piece("advantage", "batch_std"), "rewards"),
    "objective.advantage.batch_std.eps": ({}, piece("advantage", "batch_std"), 0.5),
    "objective.advantage.pass_at_k.k": ({}, piece("advantage", "pass_at_k", k=1), 2),
    "objective.advantage.pass_at_k.eps": ({}, piece("advantage", "pass_at_k", k=1), 0.5),
    "objective.advantage.max_at_k.k": ({}, piece("advantage", "max_at_k", k=2), 3),
    "objective.advantage.max_at_k.eps": ({}, piece("advantage", "max_at_k", k=2), 0.5),
    "objective.advantage.maxrl.eps": ({}, piece("advantage", "maxrl"), 0.5),
    "objective.advantage.gdpo.parts": (
        {}, piece("advantage", "gdpo", parts={"even": 1.0}), {"even": 1.0, "third": 1.0}),
    "objective.advantage.gdpo.eps": (
        {}, piece("advantage", "gdpo", parts={"even": 1.0, "third": 1.0}), 0.5),
    "objective.advantage.reinforce_plus_plus.gamma": (
        {}, piece("advantage", "reinforce_plus_plus"), 0.5),
    "objective.advantage.gae.values": (
        {}, piece("advantage", "gae", values=value_of), lambda batch: 2 * value_of(batch)),
    "objective.advantage.gae.gamma": ({}, piece("advantage", "gae", values=value_of), 0.5),
    "objective.advantage.gae.lam": (
        {}, piece("advantage", "gae", values=value_of, gamma=0.9), 0.5),
    "objective.advantage.gae.whiten": ({}, piece("advantage", "gae", values=value_of), True),
    "objective.advantage.vine.steps": (
        {}, piece("advantage", "vine", steps=3, continuations=2), 4),
    "objective.advantage.vine.continuations": (
        {}, piece("advantage", "vine", steps=3, continuations=1), 2),
    "objective.advantage.teacher.reward": (
        {"teacher.model": "teacher"}, piece("advantage", "teacher"), 1.0),
    "objective.advantage.own.function": (
        {}, piece("advantage", "own", function=own_advantage), own_advantage_raw),
    "objective.loss.clip.low": (MANY, piece("loss", "clip"), 0.01),
    "objective.loss.clip.high": (MANY, piece("loss", "clip"), 0.01),
    "objective.loss.clip.dual": (MANY, piece("loss", "clip", low=0.5, high=10.0), 1.01),
    "objective.loss.cispo.cap": (MANY, piece("loss", "cispo"), 1.01),
    "objective.loss.cispo.floor": (MANY, piece("loss", "cispo"), 0.99),
    "objective.loss.sapo.positive": (MANY, piece("loss", "sapo"), 3.0),
    "objective.loss.sapo.negative": (MANY, piece("loss", "sapo"), 3.0),
    "objective.loss.gmpo.low": (MANY, piece("loss", "gmpo"), 0.01),
    "objective.loss.gmpo.high": (MANY, piece("loss", "gmpo"), 0.01),
    "objective.loss.dppo.low": (MANY, piece("loss", "dppo"), 0.001),
    "objective.loss.dppo.high": (MANY, piece("loss", "dppo"), 0.001),
    "objective.loss.dppo.divergence": (MANY, piece("loss", "dppo", low=0.02, high=0.02), "kl"),
    "objective.loss.dppo.cap": (MANY, piece("loss", "dppo"), 1.01),
    "objective.loss.dppo.kl": (MANY, piece("loss", "dppo"), 1.0),
    "objective.loss.own.function": (
        {}, piece("loss", "own", function=own_loss), own_loss_squared),
    "objective.reduction.constant.length": ({}, piece("reduction", "constant"), 3),
    "objective.kl.name": (MANY, piece("kl", "k2"), "k3"),
    "objective.kl.coefficient": (MANY, piece("kl", "k3"), 0.5),
    "objective.kl.where": (MANY, piece("kl", "k3", coefficient=0.5), "reward"),
    "objective.kl.refresh": (MANY, piece("kl", "k3", coefficient=0.5), 1),
    "objective.kl.ema": (MANY, piece("kl", "k3", coefficient=0.5), 0.5),
    "objective.importance.name": (TRUNCATE, {"objective.importance.high": 1.01}, "mask"),
    "objective.importance.level": (TRUNCATE, {}, "sequence"),
    "objective.importance.low": (TRUNCATE, {}, 0.99),
    "objective.importance.high": (TRUNCATE, {}, 1.01),
    "objective.ratio": (MANY, {}, "sequence"),
    "objective.entropy_coefficient": ({}, {}, 0.5),
    "objective.entropy": ({}, {}, {"target": 9.0, "delta": 0.5}),
    "objective.entropy.target": (MANY, {"objective.entropy": {"target": 9.0}}, 0.01),
    "objective.entropy.delta": (MANY, {"objective.entropy": {"target": 9.0}}, 0.5),
    "objective.entropy.low": (MANY, {
        "objective.entropy_coefficient": 0.001,
        "objective.entropy": {"target": 4.65, "delta": 0.001}}, 0.001),
    "objective.entropy.high": (MANY, {"objective.entropy": {"target": 9.0, "delta": 0.5}}, 0.25),
    "objective.proximal": ({**MANY, **STALE}, {}, "recompute"),
    "length.overlong.buffer": ({}, {"length": {"name": "overlong", "buffer": 3}}, 8),
    "length.overlong.coefficient": ({}, {"length": {"name": "overlong", "buffer": 6}}, 0.1),
    "length.target.tokens": ({}, {"length": {"name": "target", "tokens": 3}}, 8),
    "length.target.coefficient": ({}, {"length": {"name": "target", "tokens": 3}}, 0.1),
    "length.at_most.tokens": ({}, {"length": {"name": "at_most", "tokens": 3}}, 8),
    "length.at_most.coefficient": ({}, {"length": {"name": "at_most", "tokens": 3}}, 0.1),
    "length.at_most.delta": ({}, {"length": {"name": "at_most", "tokens": 3}}, 0.9),
    "length.among_correct.coefficient": ({}, {"length": {"name": "among_correct"}}, 0.7),
    "length.solve_rate.coefficient": ({}, {"length": {"name": "solve_rate"}}, 0.9),
    "selection.dead_groups": (DROP, {}, "keep"),
    "selection.dead_by": (DROP, {"length": {"name": "target", "tokens": 3}}, "correct"),
    "selection.max_asked": (
        {**DROP, "selection.dead_groups": "dynamic", "selection.on_bound": "learn",
         "selection.max_asked": 2, "selection.dead_by": "correct", "rollout.group_size": 2,
         "rollout.batch": 8}, {}, 6),
    "selection.on_bound": (
        {**DROP, "selection.dead_groups": "dynamic", "selection.on_bound": "learn",
         "selection.max_asked": 2, "selection.dead_by": "correct", "rollout.group_size": 2,
         "rollout.batch": 8}, {}, "stop"),
    "selection.leave_at": ({"train.steps": 12}, {}, 0.9),
    "selection.target": ({"train.steps": 12}, {}, 0.5),
    "selection.floor": ({"train.steps": 12, "selection.target": 0.5}, {}, 0.9),
    "buffer.capacity": (REPLAY, {}, 5),
    "buffer.order": (REPLAY, {}, "weighted"),
    "buffer.max_age": (REPLAY, {}, 0),
    "buffer.max_uses": (REPLAY, {}, 1),
}  # fmt: skip
"""By setting: settings of a recipe, more of them, and another value of the setting."""


OF_EPISODES = {"objective.advantage.gae.over", "objective.advantage.turn_mean.gamma"}
"""Settings that only episodes have; see tests/integration/test_turn_credit_run.py."""


def changed_recipe(models, setting, base, value):
    """The two recipes of an entry of ``EFFECTS``."""
    base = dict(base)
    if "teacher.model" in base:
        base["teacher.model"] = str(models / base["teacher.model"])
    *head, name = setting.split(".")
    is_piece = len(head) > 1 or head == ["length"]
    path = ".".join(head[:2]) if head[0] == "objective" and is_piece else head[0]
    table = {}
    for key, given in base.items():
        table |= flatten({key: given})
    key = f"{path}.{name}"
    return transformer(models, **table), transformer(models, **table | {key: value})


@pytest.mark.parametrize("setting", EFFECTS)
def test_every_setting_changes_a_recorded_number(setting, models):
    base, more, value = EFFECTS[setting]
    first, second = changed_recipe(models, setting, base | more, value)
    if setting == "selection.on_bound":
        assert numbers(first)
        with pytest.raises(Exception, match="groups teach something"):
            numbers(second)
        return
    assert numbers(first) != numbers(second)


def fields(section, path):
    return {f"{path}.{name}" for name in section.model_fields if name != "name"}


def test_no_setting_is_left_out():
    """A new setting of an objective, a penalty, the selection or the buffer needs an entry."""
    wanted = set()
    for kind, union in (("advantage", advantages.AnyAdvantage), ("loss", losses.AnyLoss),
                        ("reduction", losses.AnyReduction)):  # fmt: skip
        for section in get_args(union):
            own = section.model_fields["name"].default
            wanted |= fields(section, f"objective.{kind}.{own}")
    for name, section in (("kl", kl.KL), ("importance", kl.Importance)):
        wanted |= fields(section, f"objective.{name}") | {f"objective.{name}.name"}
    for section in get_args(length.Penalty):
        wanted |= fields(section, f"length.{section.model_fields['name'].default}")
    wanted |= fields(selection.SelectionConfig, "selection") | fields(BufferConfig, "buffer")
    wanted |= fields(EntropyTarget, "objective.entropy")
    kept = fields(objective.ObjectiveConfig, "objective")
    wanted |= kept - {f"objective.{kind}" for kind in objective.KINDS}
    assert wanted == set(EFFECTS) | OF_EPISODES


def names_of(union):
    for section in get_args(union):
        annotation = section.model_fields["name"].annotation
        if get_origin(annotation) is Literal:
            yield from get_args(annotation)


def test_every_estimator_is_in_a_property():
    """A new advantage is put into one of the families above, or here with its reason."""
    by_others = {"gae", "teacher", "own"}  # a critic, a teacher or a script decides
    by_others |= {"turn_mean"}  # needs turns; see tests/rl/test_advantages.py
    known = set(itertools.chain(GROUPED, SCALED, UNSCALED, BY_BATCH)) | by_others
    assert known == set(names_of(advantages.AnyAdvantage))
