"""An episode that is cut into sequences with equal contexts is learned like a single sequence."""

import dataclasses

import numpy as np
import pytest
import torch

from burnish.learner.mesh.mesh import Mesh, responsible
from burnish.loops.sync import _by_response, _per_response
from burnish.recipe.objective.objective import RATIOS
from burnish.rollout.packing import Pack, cut, pack, take, train_batches
from burnish.types import PackedBatch, SequenceStart
from tests.learner.conftest import make_groups, make_learner, make_policy
from tests.learner.gang import run_ranks
from tests.learner.test_program import BOUNDS, SETTINGS, names, with_parts, with_turns, with_values

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
CUTS = (((3,), (), (0, 2, 4), (1,)), ((0,), (0, 1), (0, 3)), ((), (2,), (4,)), ((1,), ()))
"""Indices at which the sequences of each episode begin. All episodes of the second group have
prompts of their own; a sequence of the third has only the last token."""


def cut_up(groups, cuts=CUTS):
    """The same episodes as several sequences, each after all tokens before it."""

    def one(group, completion, starts):
        before = [np.append(group.prompt.token_ids, completion.token_ids[:n]) for n in starts]
        starts = zip(starts, (x.astype(np.int32) for x in before), strict=True)
        return dataclasses.replace(completion, sequences=tuple(SequenceStart(*x) for x in starts))

    return [
        dataclasses.replace(
            group,
            completions=tuple(
                one(group, c, own) for c, own in zip(group.completions, starts, strict=True)
            ),
        )
        for group, starts in zip(groups, cuts, strict=True)
    ]


def acted(batch, stream):
    """A stream's values at the actions, in the order of samples."""
    order = batch.sample_ids[batch.is_action].argsort(stable=True)
    return stream[batch.is_action][order]


def moved(batch, stream, seed):
    """The stream with the same noise in every layout: one number per action."""
    if stream is None:
        return None
    own = batch.is_action.nonzero().squeeze(1)
    own = own[batch.sample_ids[own].sort(stable=True).indices]
    noise = torch.randn(len(own), generator=torch.manual_seed(seed), dtype=torch.float64)
    return stream.index_add(0, own, 0.1 * noise.to(stream))


def exact(batch):
    """The batch with all numbers in float64, so that the order of sums does not matter."""
    floats = {k: v for k, v in vars(batch).items() if v is not None and v.is_floating_point()}
    return dataclasses.replace(batch, **{name: x.double() for name, x in floats.items()})


def learned(learner, groups):
    """Two gradient steps on a rollout: all that the learner computes, in the order of samples."""
    batch = exact(pack(groups, learner.program.graded))
    scores = learner.score(batch)
    scores = type(scores)(*(moved(batch, x, seed) for seed, x in enumerate(scores)))
    advantages = learner.program.advantages(batch, scores)
    (learn,) = learner.program.batches(batch, advantages, scores, [Pack.whole(batch)])
    learn = dataclasses.replace(learn, loss_weight=learn.loss_weight.double())
    streams = {
        name: acted(batch, x)
        for name, x in (vars(learn) | scores._asdict()).items()
        if isinstance(x, torch.Tensor) and name != "slots"
    }
    learner._accumulate(learn)
    gradients = [p.grad.clone() for p in learner.policy.parameters() if p.grad is not None]
    learner.optimizer.drop_gradients()
    metrics = learner.step(learn) | learner.finish()[0]
    means = _per_response(batch, advantages)
    return streams, gradients, metrics, means, _by_response(batch, advantages)


def assert_learned_alike(objective, critic=None, valued=False, **train):
    groups = with_parts(with_turns(make_groups()))
    if objective.get("advantage", {}) == {"name": "maxrl", "eps": 0.5}:  # it refuses negative ones
        groups = [
            dataclasses.replace(
                g, grades=tuple(dataclasses.replace(x, reward=abs(x.reward)) for x in g.grades)
            )
            for g in groups
        ]
    groups = with_values(groups) if valued else groups
    found = []
    for given in (groups, cut_up(groups)):
        learner = make_learner(make_policy(), objective, critic, log_kl=True, **train)
        learner.teacher = make_policy() if "teacher" in learner.program.passes(2) else None
        for weight in learner.reference.parameters() if learner.reference else ():
            weight.mul_(1.1)  # elsewhere than the policy
        found.append(learned(learner, given))
    (want, slopes, metrics, means, tokens), (got, others, same, rows, each) = found
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **CLOSE)
    assert len(others) == len(slopes) > 0
    for a, b in zip(others, slopes, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert same == pytest.approx(metrics, rel=1e-7, abs=1e-9)
    assert rows == pytest.approx(means, rel=1e-6, abs=1e-7)
    for a, b in zip(each, tokens, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", names("advantage"))
def test_every_advantage(name):
    settings = SETTINGS.get(name, {})
    assert_learned_alike({"advantage": {"name": name, **settings}}, valued=name == "vine")


@pytest.mark.parametrize("loss", names("loss"))
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_loss_and_ratio(loss, ratio):
    assert_learned_alike({"loss": {"name": loss, **BOUNDS.get(loss, {})}, "ratio": ratio})


@pytest.mark.parametrize("reduction", names("reduction"))
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_reduction(reduction, ratio):
    settings = {"length": 9.0} if reduction == "constant" else {}
    assert_learned_alike({"reduction": {"name": reduction, **settings}, "ratio": ratio})


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("advantage", ["group_mean", "reinforce_plus_plus"])
def test_every_penalty(name, advantage):
    kl = {"name": name, "coefficient": 0.3, "where": "reward"}
    assert_learned_alike({"kl": kl, "advantage": advantage})
    if name != "k1":
        kl["where"] = "loss"
        assert_learned_alike({"kl": kl, "advantage": advantage, "entropy_coefficient": 0.1})


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_every_correction(level):
    rejected = {"name": "reject", "level": "geometric", "low": 0.9, "high": 1.1}
    for name in ("truncate", "mask"):
        one = {"name": name, "level": level, "low": 0.8, "high": 1.2}
        assert_learned_alike({"importance": [one, rejected]})


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("split", [{}, {"micro_tokens": 70}, {"micro_sequences": 3}], ids=str)
def test_a_critic_and_packs(shared, split):
    critic = {"learning_rate": 1e-2, "shared": shared}
    gae = {"advantage": {"name": "gae", "gamma": 0.9, "lam": 0.8}, "reduction": "token_mean"}
    assert_learned_alike(gae, critic, **split)
    gae["advantage"]["over"] = "turns"
    assert_learned_alike(gae, critic, **split)
    assert_learned_alike({"ratio": "sequence", "loss": "gmpo"}, **split)


def check_mesh(rank):
    """Each of two ranks computes whole samples; together they are the batch of one process."""
    groups = make_groups()
    for objective in ({"ratio": "sequence"}, {"kl": {"name": "k3", "coefficient": 0.3}}):
        alone = make_learner(make_policy(), objective, micro_tokens=70)
        want = learned(alone, groups)
        meshed = make_learner(make_policy(), objective, micro_tokens=70)
        mesh = Mesh((2, 1, 1), meshed.policy.config)
        learner = type(meshed)(make_policy(), meshed.program, meshed.train, ranks=mesh)
        batch = exact(pack(cut_up(groups)))
        assert set(responsible(batch, 2).tolist()) == {0, 1}
        scores = learner.score(batch)
        scores = type(scores)(*(moved(batch, x, seed) for seed, x in enumerate(scores)))
        advantages = learner.program.advantages(batch, scores)
        (learn,) = learner.program.batches(batch, advantages, scores, [Pack.whole(batch)])
        learn = dataclasses.replace(learn, loss_weight=learn.loss_weight.double())
        for name, stream in want[0].items():
            own = getattr(learn, name, None)
            if own is not None:
                torch.testing.assert_close(acted(batch, own), stream, **CLOSE)
        found = learner.step(learn) | learner.finish()[0]
        known = {name: want[2][name] for name in found}
        assert found == pytest.approx(known, rel=1e-7, abs=1e-9)


@pytest.mark.slow
def test_a_mesh():
    run_ranks(2, check_mesh)


def test_the_layout():
    groups = cut_up(make_groups([(2, (3, 2)), (1, (2,))]), (((1, 2), ()), ((0,),)))
    batch = pack(groups)
    assert batch.segment_offsets.diff().tolist() == [2, 1, 2, 3, 1, 4, 1, 1, 2]
    assert batch.segment_is_prompt.tolist() == [1, 0, 0, 1, 0, 1, 0, 1, 0]
    assert batch.segment_samples.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 2]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.last_segments.tolist() == [6, 2, 8]
    assert batch.lengths.tolist() == [2, 1, 1]
    assert batch.is_action.sum() == batch.lengths.sum()
    assert batch.positions[batch.sample_ids == 1].tolist() == [2, 3]
    first, second = (groups[0].completions[0].sequences[i].prompt.tolist() for i in (0, 1))
    assert batch.tokens[5:8].tolist() == first
    assert batch.tokens[9:13].tolist() == second
    assert batch.predecessor[8] == 7
    assert batch.positions[8] == 3


def test_parts_are_what_packing_their_samples_gives():
    """Train batches, packs of a limited size, and arbitrary samples."""
    groups = with_turns(with_values(cut_up(make_groups())))
    whole = pack(groups)
    numbers = [(g, i) for g, group in enumerate(groups) for i in range(len(group.completions))]

    def expected(samples):
        chosen = []
        for g, group in enumerate(groups):
            own = [i for n, (of, i) in enumerate(numbers) if of == g and n in samples]
            if own:
                completions = tuple(group.completions[i] for i in own)
                grades = tuple(group.grades[i] for i in own)
                chosen.append(dataclasses.replace(group, completions=completions, grades=grades))
        return pack(chosen)

    def check(part, samples):
        want = expected(samples)
        for field in dataclasses.fields(PackedBatch):
            a, b = getattr(part.batch, field.name), getattr(want, field.name)
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(whole.tokens[part.slots], part.batch.tokens)

    random = np.random.default_rng(0)
    for _ in range(30):
        samples = np.flatnonzero(random.random(len(numbers)) < 0.5)
        if len(samples):
            check(take(whole, torch.from_numpy(samples)), set(samples.tolist()))
    for limit in ((None, 4), (None, 1), (60,), (90,), (300,)):
        packs, taken = cut(whole, *limit), []
        for part in packs:
            ids = whole.sample_ids[part.slots[part.batch.is_action]]
            taken.append(set(ids.tolist()))
            check(part, taken[-1])
            assert len(part.batch.tokens) <= (limit[0] or 300)
        assert sorted(n for one in taken for n in one) == list(range(len(numbers)))
    assert [len(x.batch.rewards) for x in train_batches(whole, 7)] == [7, 5]
