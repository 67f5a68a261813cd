"""Each piece reaches the loss with its settings."""

import json
import math
from dataclasses import replace
from functools import partial
from statistics import stdev
from typing import get_args

import pytest
import torch

from burnish.errors import ConfigError, DataError
from burnish.learner import program as objective
from burnish.recipe.objective.objective import RATIOS, ObjectiveConfig
from burnish.recipe.plan import objective_lines
from burnish.rl import advantages, kl, losses, ratios
from burnish.rl.sequences import on_last_action, sequence_sum
from burnish.rollout.packing import Pack, pack
from burnish.types import Measured, Scores, Turn


def make_program(**settings):
    return objective.compile(ObjectiveConfig(**settings))


def random(batch, seed):
    noise = 0.3 * torch.randn(len(batch.tokens), generator=torch.manual_seed(seed))
    return torch.where(batch.is_action, batch.behavior_logprobs + noise, 0.0)


def learn_batch(program, batch, reference=None):
    scores = Scores(random(batch, 0), reference)
    found = program.advantages(batch, scores)
    (learn,) = program.batches(batch, found, scores, [Pack.whole(batch)])
    return learn


def names(kind):
    """The names of the pieces of a kind that a recipe file may give."""
    kinds = get_args(ObjectiveConfig.model_fields[kind].annotation)
    found = [kind.model_fields["name"].default for kind in kinds]
    return [name for name in found if name != "own"]


def with_values(groups):
    """A value before every token."""

    def valued(completion):
        return replace(completion, values=completion.logprobs**2)

    return [replace(g, completions=tuple(map(valued, g.completions))) for g in groups]


def with_turns(groups):
    """Turns of two tokens, of which every second one has no reward."""

    def one(completion):
        starts = range(0, len(completion.token_ids), 2)
        ends = [min(start + 2, len(completion.token_ids)) for start in starts]
        turns = tuple(
            Turn(start, end, "", (), None if place % 2 else 0.25 + place, {}, None)
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        )
        return replace(completion, turns=turns)

    return [replace(g, completions=tuple(map(one, g.completions))) for g in groups]


SETTINGS = {
    "turn_mean": {"gamma": 0.9},
    "group_zscore": {"eps": 0.5},
    "best_of_group": {"centered": True},
    "reinforce_plus_plus": {"gamma": 0.9},
    "batch_std": {"of": "rewards", "eps": 0.5},
    "pass_at_k": {"k": 1, "eps": 0.5},
    "max_at_k": {"k": 2, "eps": 0.5},
    "maxrl": {"eps": 0.5},
    "gdpo": {"parts": {"format": 0.5, "answer": 2.0}, "eps": 0.5},
    "gae": {"values": lambda batch: batch.positions.float(), "gamma": 0.9, "lam": 0.8},
    "teacher": {"reward": 0.5},
}


def parts_of(completion, grade):
    is_long = float(len(completion.token_ids) > 1)
    return {"answer": grade.reward / 2, "format": is_long, "greedy": 1.5}


def with_parts(groups):
    """Grades with parts: format is 1 if the response is long, answer is the reward's half."""
    return [
        replace(
            group,
            grades=tuple(replace(g, parts=parts_of(c, g)) for c, g in group.graded),
        )
        for group in groups
    ]


@pytest.mark.parametrize("name", names("advantage"))
def test_advantages(name, two_groups):
    settings = SETTINGS.get(name, {})
    program = make_program(advantage={"name": name, **settings})
    groups = with_values(two_groups) if name == "vine" else two_groups
    groups = with_turns(groups) if name == "turn_mean" else groups
    batch = pack(with_parts(groups), program.graded)
    mask, ids = batch.is_action, batch.sample_ids
    proximal, taught = random(batch, 0), random(batch, 1)
    got = program.advantages(batch, Scores(proximal, teacher=taught))
    r, g = batch.rewards, batch.group_ids
    means = torch.tensor([0.5, 4.0])  # of the groups' rewards: 1, 0 and 2, 3, 7
    over_tokens = {
        "teacher": lambda: torch.where(mask, taught - proximal + 0.5 * (r - means[g])[ids], 0.0),
        "reinforce_plus_plus_baseline": lambda: advantages.reinforce_plus_plus_baseline(
            r, g, mask, sequence_ids=ids
        ),
        "gae": lambda: advantages.gae(
            on_last_action(r, mask, ids),
            batch.positions.float(),
            mask,
            gamma=0.9,
            lam=0.8,
            sequence_ids=ids,
        )[0],
        "reinforce_plus_plus": lambda: advantages.reinforce_plus_plus(
            on_last_action(r, mask, ids), mask, gamma=0.9, sequence_ids=ids
        ),
    }
    over_tokens["turn_mean"] = lambda: advantages.turn_mean(
        batch.turn_rewards.nan_to_num(),
        batch.turn_rewards.isfinite(),
        mask,
        g,
        gamma=0.9,
        sequence_ids=ids,
    )
    over_tokens["vine"] = lambda: advantages.vine(
        on_last_action(r, mask, ids), batch.values, mask, sequence_ids=ids
    )
    own = {
        "gdpo": lambda: advantages.gdpo(batch.parts, g, weights=[0.5, 2.0], eps=0.5),
        "remax": lambda: r - 1.5,
        "opo": lambda: advantages.opo(r, g, torch.tensor([2, 1, 3, 1, 2])),
    }
    if name in over_tokens:
        expected = over_tokens[name]()
    else:
        per_response = own[name]() if name in own else getattr(advantages, name)(r, g, **settings)
        expected = torch.where(mask, per_response[ids], 0.0)
    torch.testing.assert_close(got, expected)


def test_gae_over_turns(two_groups):
    def value(batch):
        return batch.positions.float()

    settings = {"gamma": 0.9, "lam": 0.8}
    program = make_program(advantage={"name": "gae", "values": value, "over": "turns", **settings})
    batch = pack(with_turns(two_groups))
    rewards, ends = batch.turn_rewards.nan_to_num(), batch.turn_rewards.isfinite()
    mask, ids = batch.is_action, batch.sample_ids
    expected, _ = advantages.turn_gae(
        rewards, value(batch), ends, mask, **settings, sequence_ids=ids
    )
    torch.testing.assert_close(program.advantages(batch, Scores()), expected)
    assert len(set(expected[ids == 2].tolist())) == 3  # the prompt's 0, and two turns


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_an_episode_gets_the_reward_of_a_turn_at_its_end(name, two_groups):
    """Not at the end of the episode, so that later turns are not credited with it."""
    batch = pack(with_turns(two_groups))
    mask, ids = batch.is_action, batch.sample_ids
    rewards = batch.turn_rewards.nan_to_num()
    assert not torch.equal(rewards, on_last_action(batch.rewards, mask, ids))
    zeros = torch.zeros_like(rewards)
    if name == "gae":
        own = {"values": lambda batch: zeros, "gamma": 0.9}
        expected = advantages.gae(rewards, zeros, mask, gamma=0.9, sequence_ids=ids)[0]
    else:
        own = {"gamma": 0.9}
        expected = advantages.reinforce_plus_plus(rewards, mask, gamma=0.9, sequence_ids=ids)
    program = make_program(advantage={"name": name, **own})
    torch.testing.assert_close(program.advantages(batch, Scores()), expected)


def test_episodes_that_are_not_in_the_loss_count_in_the_mean_of_turns(two_groups):
    groups = with_turns(two_groups)
    first, *others = groups[1].completions
    first = replace(first, in_loss=False)
    masked = [groups[0], replace(groups[1], completions=(first, *others))]
    program = make_program(advantage="turn_mean")
    whole, part = pack(groups), pack(masked)
    expected = program.advantages(whole, Scores())
    got = program.advantages(part, Scores())
    is_masked = whole.sample_ids == 2
    assert expected[is_masked].any()
    torch.testing.assert_close(got, torch.where(is_masked, 0.0, expected))


@pytest.mark.parametrize("name", ["turn_mean", "raw", "reinforce_plus_plus"])
def test_kl_in_the_reward_lowers_it(name, two_groups):
    batch = pack(with_turns(two_groups) if name == "turn_mean" else two_groups)
    mask, ids = batch.is_action, batch.sample_ids
    proximal, reference = random(batch, 0), random(batch, 1)
    term = {"name": "k1", "where": "reward", "coefficient": 0.5}
    program = make_program(advantage=name, kl=term)
    got = program.advantages(batch, Scores(proximal, reference))
    x = kl.k1(proximal, reference)
    if name == "raw":
        sums = [x[mask & (ids == i)].sum() for i in range(5)]
        expected = torch.where(mask, (batch.rewards - 0.5 * torch.stack(sums))[ids], 0.0)
    elif name == "turn_mean":
        ends, rewards = batch.turn_rewards.isfinite(), batch.turn_rewards.nan_to_num() - 0.5 * x
        groups = batch.group_ids
        expected = advantages.turn_mean(rewards, ends, mask, groups, sequence_ids=ids)
    else:
        placed = on_last_action(batch.rewards, mask, ids)
        rewards = kl.penalised_rewards(placed, x, mask, coefficient=0.5)
        expected = advantages.reinforce_plus_plus(rewards, mask, sequence_ids=ids)
    torch.testing.assert_close(got, expected)


BOUNDS = {
    "clip": {"low": 0.1, "high": 0.2, "dual": 1.3},
    "cispo": {"cap": 1.1, "floor": 0.9},
    "sapo": {"positive": 0.9, "negative": 2.0},
    "gmpo": {"low": 0.1, "high": 0.2},
    "dppo": {"low": 0.01, "high": 0.02, "divergence": "kl", "cap": 1.1, "kl": 0.3},
}


def test_the_std_of_advantages_is_over_n_minus_1(two_groups):
    batch = pack(two_groups)
    program, zeros = make_program(), torch.zeros_like(batch.behavior_logprobs)
    learn = learn_batch(program, batch)
    acted = learn.advantages[batch.is_action].tolist()
    found = program.metrics(Measured(zeros, zeros), learn)["train/advantage_std"]
    assert found == pytest.approx(stdev(acted), rel=1e-5)
    alone = torch.zeros_like(batch.is_action)
    alone[batch.is_action.nonzero()[0]] = True
    single = replace(learn, batch=replace(batch, is_action=alone))
    assert program.metrics(Measured(zeros, zeros), single)["train/advantage_std"] == 0


@pytest.mark.parametrize("loss", names("loss"))
@pytest.mark.parametrize("ratio", RATIOS)
def test_losses(loss, ratio, two_groups):
    batch = pack(two_groups)
    program = make_program(loss={"name": loss, **BOUNDS.get(loss, {})}, ratio=ratio)
    learn = learn_batch(program, batch)
    logprobs = random(batch, 2)
    entropy = torch.ones_like(logprobs)
    got = program.token_loss(Measured(logprobs, entropy), learn)
    metrics = program.metrics(Measured(logprobs, entropy), learn)
    r = ratios.token_ratio(logprobs, learn.proximal_logprobs)
    if ratio == "sequence":
        r = ratios.sequence_ratio(
            logprobs, learn.proximal_logprobs, batch.is_action, sequence_ids=batch.sample_ids
        )
    a, old = learn.advantages, learn.proximal_logprobs
    mask, ids = batch.is_action, batch.sample_ids
    expected = {
        "reinforce": lambda: losses.reinforce(logprobs, a),
        "unclipped": lambda: losses.unclipped(r, a),
        "clip": lambda: losses.clipped(r, a, low=0.1, high=0.2, dual=1.3),
        "cispo": lambda: losses.cispo(logprobs, r, a, cap=1.1, floor=0.9),
        "sapo": lambda: losses.sapo(r, a, positive=0.9, negative=2.0),
        "gmpo": lambda: losses.gmpo(logprobs, old, a, mask, low=0.1, high=0.2, sequence_ids=ids),
        "dppo": lambda: losses.dppo(logprobs, old, a, **BOUNDS["dppo"]),
    }[loss]()
    torch.testing.assert_close(got, expected)
    acted = r[batch.is_action]
    assert metrics["train/ratio_min"] == pytest.approx(acted.min().item())
    assert metrics["train/ratio_max"] == pytest.approx(acted.max().item())
    assert metrics["train/entropy"] == 1.0
    bounded = {
        "gmpo": lambda: losses.is_beyond(logprobs - old, a, low=0.1, high=0.2),
        "dppo": lambda: losses.dppo(logprobs, old, a, **BOUNDS["dppo"] | {"kl": 0}) == 0,
    }
    assert ("train/clip_fraction" in metrics) == (loss in ("clip", "cispo", *bounded))
    if loss in bounded:
        fraction = bounded[loss]()[mask].float().mean().item()
        assert metrics["train/clip_fraction"] == pytest.approx(fraction)
        assert 0 < fraction < 1


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_kl_and_entropy_terms_are_added(name, two_groups):
    batch = pack(two_groups)
    reference, logprobs = random(batch, 1), random(batch, 2)
    term = {"name": name, "coefficient": 0.3}
    program = make_program(loss="reinforce", kl=term, entropy_coefficient=0.2)
    learn = learn_batch(program, batch, reference)
    entropy = 3 * torch.ones_like(logprobs)
    got = program.token_loss(Measured(logprobs, entropy), learn)
    metrics = program.metrics(Measured(logprobs, entropy), learn)
    term = getattr(kl, name)(logprobs, reference)
    expected = losses.reinforce(logprobs, learn.advantages) + 0.3 * term - 0.2 * 3
    torch.testing.assert_close(got, expected)
    for estimator in (kl.k1, kl.k3):
        mean = estimator(logprobs, reference)[batch.is_action].mean().item()
        assert metrics[f"kl/reference_{estimator.__name__}"] == pytest.approx(mean)


TARGET = {"target": 0.5, "delta": 0.25, "high": 0.6}


def test_the_entropy_coefficient_follows_the_entropy_of_the_step_before(two_groups):
    """By hand: 0.25 at first; 0.5 and then 0.6, the bound, because the entropy is low; above the
    target 0, while the coefficient falls to 0.35, which acts as soon as the entropy is low."""
    batch = pack(two_groups)
    program = make_program(loss="reinforce", entropy_coefficient=0.25, entropy=TARGET)
    learn, logprobs = learn_batch(program, batch), random(batch, 2)
    policy = losses.reinforce(logprobs, learn.advantages)
    steps = [(0.4, 0.25), (0.5, 0.5), (0.7, 0.6), (0.4, 0.0), (0.6, 0.6), (0.3, 0.0), (0.3, 0.6)]
    for mean, applied in steps:
        entropy = torch.full_like(logprobs, mean).requires_grad_()
        loss = program.token_loss(Measured(logprobs, entropy), learn)
        torch.testing.assert_close(loss.detach(), policy - applied * mean)
        if applied:
            (slope,) = torch.autograd.grad(loss.sum(), entropy)
            torch.testing.assert_close(slope, torch.full_like(slope, -applied))
        metrics = program.metrics(Measured(logprobs, entropy.detach()), learn)
        assert metrics["train/entropy_coefficient"] == pytest.approx(applied, abs=1e-12)
        program.adapt(metrics)


def test_an_adapted_coefficient_is_state(two_groups):
    objective = {"loss": "reinforce", "entropy_coefficient": 0.25, "entropy": TARGET}
    first, second = make_program(**objective), make_program(**objective)
    for mean in (0.7, 0.4, 0.7):
        first.adapt({"train/entropy": mean})
        second.load_state(json.loads(json.dumps(first.state())))
        assert second.state() == first.state()
        assert second.control.applied == first.control.applied
    assert make_program(entropy_coefficient=0.25).state() == {}


@pytest.mark.parametrize(("settings", "kept"), [({}, 3), ({"entropy": TARGET}, 5)])
def test_an_entropy_target_keeps_responses_without_advantage(settings, kept, two_groups):
    """Also with a first coefficient of 0, because the coefficient may rise."""
    groups = [replace(two_groups[0], grades=two_groups[0].grades[:1] * 2), two_groups[1]]
    batch = pack(groups)
    program = make_program(loss="reinforce", **settings)
    found = program.advantages(batch, Scores())
    learn = program.batches(batch, found, Scores(), [Pack.whole(batch)] * 2)[0]
    assert len(learn.batch.rewards) == kept


def test_kl_in_the_reward_stays_out_of_the_loss(two_groups):
    batch = pack(two_groups)
    reference, logprobs = random(batch, 1), random(batch, 2)
    program = make_program(loss="reinforce", kl={"name": "k1", "where": "reward"})
    learn = learn_batch(program, batch, reference)
    got = program.token_loss(Measured(logprobs, torch.ones_like(logprobs)), learn)
    torch.testing.assert_close(got, losses.reinforce(logprobs, learn.advantages))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_importance_weighs_the_loss(kind, level, two_groups):
    batch = pack(two_groups)
    importance = {"name": kind, "level": level, "low": 0.8, "high": 1.2}
    program = make_program(loss="reinforce", importance=importance)
    learn = learn_batch(program, batch)
    logprobs = random(batch, 2)
    entropy = torch.ones_like(logprobs)
    got = program.token_loss(Measured(logprobs, entropy), learn)
    metrics = program.metrics(Measured(logprobs, entropy), learn)
    weights = ratios.importance_ratio(
        learn.proximal_logprobs,
        batch.behavior_logprobs,
        batch.is_action,
        level=level,
        sequence_ids=batch.sample_ids,
    )
    bound = ratios.truncate if kind == "truncate" else ratios.keep_between
    weights = bound(weights, low=0.8, high=1.2)
    torch.testing.assert_close(got, weights * losses.reinforce(logprobs, learn.advantages))
    mean = weights[batch.is_action].mean().item()
    assert metrics["train/importance"] == pytest.approx(mean)


GEOMETRIC = {"name": "reject", "level": "geometric", "low": 0.9, "high": 1.1}
TRUNCATED = {"name": "truncate", "high": 1.05}


def test_the_weights_of_several_corrections_are_multiplied(two_groups):
    """A mask of sequences with truncated token weights: by hand, from x = log prox − log behavior,
    in float64. Sequence 0 is kept and one of its ratios truncated; the means of x of sequence 1
    (−0.2) and of sequence 3 (0.15) are outside of log 0.9 and log 1.1."""
    batch = pack(two_groups)  # of 2, 1, 3, 1 and 2 actions
    moved = [[0.08, -0.04], [-0.2], [0.01, 0.02, 0.03], [0.15], [-0.1, 0.1]]
    proximal = batch.behavior_logprobs.clone()
    proximal[batch.is_action] += torch.tensor([x for row in moved for x in row])
    both = [GEOMETRIC, TRUNCATED]
    program = make_program(loss="reinforce", importance=both)
    scores = Scores(proximal)
    found = program.advantages(batch, scores)
    (learn,) = program.batches(batch, found, scores, [Pack.whole(batch)])
    cut = [[min(math.exp(x), 1.05) for x in row] for row in moved]
    kept = [abs(sum(row) / len(row)) < 0.09 for row in moved]
    assert kept == [True, False, True, False, True]
    want = [w * keep for row, keep in zip(cut, kept, strict=True) for w in row]
    action = batch.is_action
    assert learn.importance[action].tolist() == pytest.approx(want, rel=1e-5)
    logprobs = proximal.clone().requires_grad_()
    loss = program.token_loss(Measured(logprobs, torch.ones_like(logprobs)), learn)
    loss[action].sum().backward()
    slopes = -torch.tensor(want) * learn.advantages[action]
    torch.testing.assert_close(logprobs.grad[action], slopes)
    metrics = program.metrics(Measured(proximal, proximal), learn)
    assert {name: x for name, x in metrics.items() if "importance" in name} == pytest.approx(
        {
            "train/importance": sum(want) / 9,
            "train/importance_reject_geometric": 7 / 9,
            "train/importance_reject_geometric_outside": 2 / 9,
            "train/importance_truncate_token": sum(map(sum, cut)) / 9,
            "train/importance_truncate_token_outside": 3
            / 9,  # 0.08, 0.15 and 0.1 are above log 1.05
        },
        rel=1e-5,
    )
    for one in both:
        alone = make_program(loss="reinforce", importance=[one])
        assert alone == make_program(loss="reinforce", importance=one)
        (learn,) = alone.batches(batch, found, scores, [Pack.whole(batch)])
        names = alone.metrics(Measured(proximal, proximal), learn)
        assert [name for name in names if "importance" in name] == ["train/importance"]


def test_denominators(two_groups):
    batch = pack(two_groups)
    totals = {"sequence_mean": 1.0, "token_mean": 1.0, "prompt_mean": 1.0, "constant": 9 / (5 * 4)}
    for name, total in totals.items():
        length = {"length": 4} if name == "constant" else {}
        weights = learn_batch(make_program(reduction={"name": name, **length}), batch).loss_weight
        assert weights.sum().item() == pytest.approx(total)
        assert weights[~batch.is_action].abs().sum() == 0


def test_prompt_mean_takes_the_groups_of_the_batch(two_groups):
    # The groups have 3 and 6 tokens; each has half of the weight.
    learn = learn_batch(make_program(reduction="prompt_mean"), pack(two_groups))
    groups = learn.batch.group_ids[learn.batch.sample_ids]
    for group, weight in ((0, 1 / 6), (1, 1 / 12)):
        own = learn.loss_weight[learn.batch.is_action & (groups == group)]
        torch.testing.assert_close(own, torch.full_like(own, weight))


def test_a_squared_log_ratio_keeps_responses_without_advantage(two_groups):
    groups = [replace(two_groups[0], grades=two_groups[0].grades[:1] * 2), two_groups[1]]
    batch = pack(groups)
    parts = [Pack.whole(batch)] * 2
    for kl_weight, kept in ((0.0, 3), (0.1, 5)):
        program = make_program(loss={"name": "dppo", "kl": kl_weight})
        advantages = program.advantages(batch, Scores())
        learn = program.batches(batch, advantages, Scores(), parts)[0]
        assert len(learn.batch.rewards) == kept


def test_a_part_that_a_grade_lacks_is_named(two_groups):
    program = make_program(advantage={"name": "gdpo", "parts": {"style": 1.0}})
    with pytest.raises(
        DataError, match=r"reads the part 'style' .* of p0 has answer, format, greedy; name"
    ):
        pack(with_parts(two_groups), program.graded)


@pytest.mark.parametrize("advantage", ["maxrl", {"name": "gdpo", "parts": {"answer": 1.0}}])
def test_a_kl_in_the_reward_needs_a_place(advantage):
    with pytest.raises(ValueError, match=r"does not support; use .*objective\.kl\.where = 'loss'"):
        make_program(advantage=advantage, kl={"name": "k1", "where": "reward"})


def above_the_best(rewards, group_ids):
    return rewards - rewards.max()


def squared(logprobs, ratio, advantages):
    return advantages * ratio**2


def test_functions_of_a_script_are_pieces(two_groups):
    batch = pack(two_groups)
    program = make_program(advantage=above_the_best, loss=squared)
    learn = learn_batch(program, batch)
    rewards, ids = batch.rewards, batch.sample_ids
    expected = torch.where(batch.is_action, (rewards - rewards.max())[ids], 0.0)
    torch.testing.assert_close(learn.advantages, expected)
    logprobs = random(batch, 2)
    got = program.token_loss(Measured(logprobs, torch.ones_like(logprobs)), learn)
    ratio = ratios.token_ratio(logprobs, learn.proximal_logprobs)
    torch.testing.assert_close(got, expected * ratio**2)
    lines = dict(objective_lines(program.objective))
    assert lines["advantage"] == "A_i = above_the_best(r, groups)"
    assert lines["objective"] == "L_t = squared(log π, ρ_t, A_t)"


def with_streams(logprobs, ratio, advantages, *, sequence_ids, mask, behavior, entropy, scale=2.0):
    found = sequence_sum(logprobs - behavior, mask, sequence_ids)
    return scale * found[sequence_ids] + entropy - advantages * ratio


def test_a_loss_of_a_script_receives_the_streams_that_it_names(two_groups):
    batch = pack(two_groups)
    program = make_program(loss=with_streams)
    learn = learn_batch(program, batch)
    logprobs, entropy = random(batch, 2), random(batch, 3)
    got = program.token_loss(Measured(logprobs, entropy), learn)
    gap, ids = logprobs - batch.behavior_logprobs, batch.sample_ids
    totals = [gap[batch.is_action & (ids == i)].sum() for i in range(5)]
    ratio = ratios.token_ratio(logprobs, learn.proximal_logprobs)
    want = 2 * torch.stack(totals)[ids] + entropy - learn.advantages * ratio
    torch.testing.assert_close(got, want)
    shown = "L_t = with_streams(log π, ρ_t, A_t, sequence_ids, mask, behavior, entropy)"
    assert dict(objective_lines(program.objective))["objective"] == shown


def on_proximal(logprobs, ratio, advantages, proximal):
    return (logprobs - proximal) ** 2


def test_a_loss_with_streams_keeps_responses_without_advantage(two_groups):
    """The function may have a term without the advantage; three parameters have none, as before."""
    groups = [replace(two_groups[0], grades=two_groups[0].grades[:1] * 2), two_groups[1]]
    batch = pack(groups)
    for loss, kept in ((squared, 3), (on_proximal, 5)):
        program = make_program(loss=loss)
        found = program.advantages(batch, Scores())
        learn = program.batches(batch, found, Scores(), [Pack.whole(batch)] * 2)[0]
        assert len(learn.batch.rewards) == kept


def test_a_loss_that_is_not_per_token_is_refused(two_groups):
    """A mean would be broadcast, and the reduction would have no effect."""
    batch = pack(two_groups)
    for function, got in (
        (lambda logprobs, ratio, advantages: (-ratio * advantages).mean(), r"the shape \[\]"),
        (lambda logprobs, ratio, advantages: -(ratio * advantages)[:, None], r"the shape \[\d+, 1"),
        (lambda logprobs, ratio, advantages: None, "NoneType"),
    ):
        program = make_program(loss=function)
        learn = learn_batch(program, batch)
        with pytest.raises(ConfigError, match=f"the loss of each token, of the shape .* got {got}"):
            program.token_loss(Measured(random(batch, 2), random(batch, 3)), learn)


class Callable:
    def __call__(self, logprobs, ratio, advantages, *, mask, **rest):
        return logprobs


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (squared, ()),
        (on_proximal, ("proximal",)),
        (Callable(), ("mask",)),
        (partial(with_streams, scale=1.0), ("sequence_ids", "mask", "behavior", "entropy")),
        (lambda *given: given[0], ()),
        (lambda logprobs, *given, mask: given[0], ("mask",)),
        (lambda logprobs, ratio, advantages, low=0.2: logprobs, ()),
        (max, ()),
    ],
    ids=["plain", "proximal", "callable", "partial", "star", "keyword", "default", "builtin"],
)
def test_the_signature_of_a_loss_names_its_streams(function, asked):
    assert make_program(loss=function).objective.loss.asked == asked


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logprobs, ratio: ratio, "takes 2 positional parameters, and a loss is called with"),
        (
            lambda logprobs, ratio, advantages, *, maks: ratio,
            r"'maks', and a loss can receive mask, sequence_ids, behavior, proximal, entropy; "
            r"did you mean 'mask'\?; rename it, remove it, or give it a default",
        ),
        (lambda logprobs, ratio, advantages, reward: ratio, "has the parameter 'reward'"),
        (lambda logprobs, ratio, advantages, mask, /: ratio, "takes mask by position only"),
        (3.0, r"loss\.own\.function\n.* must be a function, got 3\.0"),
    ],
    ids=lambda value: None,
)
def test_a_loss_with_an_unknown_parameter_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        make_program(loss={"name": "own", "function": function})


def test_a_function_that_is_not_here_is_refused():
    with pytest.raises(
        ConfigError, match=r"'better' is only the name of a function; .*\(…, objective="
    ):
        make_program(advantage={"name": "own", "function": "better"})
    with pytest.raises(ConfigError, match=r"\"values\": height"):
        make_program(advantage={"name": "gae", "values": "height"})
