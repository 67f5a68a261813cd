"""The learner with a language model: any split is the batch, any precision has fp32 masters."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from burnish.engine.native.engine import NativeEngine
from burnish.engine.native.scheduler import EngineSettings
from burnish.engine.protocol import Request
from burnish.errors import BurnishError
from burnish.learner.protocol import LearnerState
from burnish.rollout.packing import Pack, pack, take_streams, train_batches
from burnish.types import Grade, Group, SamplingParams
from tests.learner.conftest import (
    make_groups,
    make_learn_batch,
    make_learner,
    make_policy,
    masters,
)

OBJECTIVES = {
    "clip, kl, entropy": {"kl": {"name": "k3", "coefficient": 0.3}, "entropy_coefficient": 0.1},
    "gspo": {"ratio": "sequence", "reduction": "token_mean"},
    "cispo, importance": {"loss": "cispo", "importance": "truncate"},
    "several importances": {
        "importance": ["truncate", {"name": "reject", "level": "sequence", "low": 0.9, "high": 1.1}]
    },
}
SPLITS = [{"micro_tokens": 17}, {"micro_tokens": 30}, {"micro_tokens": 60}]


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize(
    ("split", "dtype", "tolerance"),
    [*((split, torch.float64, 1e-12) for split in SPLITS), (SPLITS[1], torch.float32, 3e-6)],
    ids=str,
)
def test_any_split_is_the_whole_batch(split, dtype, tolerance, objective, batch):
    """Gradients and every metric; the streams are the same in both."""
    whole = make_learner(make_policy(dtype), objective)
    parts = make_learner(make_policy(dtype), objective, **split)
    for learner in (whole, parts):
        for weight in learner.reference.parameters() if learner.reference else ():
            weight.mul_(1.1)  # elsewhere than the policy
    learn = make_learn_batch(whole, batch)
    got, want = parts._accumulate(learn)[0], whole._accumulate(learn)[0]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for a, b in zip(parts.policy.parameters(), whole.policy.parameters(), strict=True):
        scale = b.grad.abs().max().item()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=tolerance * scale)
    for learner in (parts, whole):
        learner.optimizer.drop_gradients()
    got, want = parts.step(learn), whole.step(learn)
    assert got == pytest.approx(want, rel=100 * tolerance, abs=tolerance)


@pytest.mark.parametrize("split", [{}, *SPLITS], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_come_from_the_packs_of_training(precision, split):
    """To the bit: before the first step of each train batch the ratio is exactly 1."""
    batch = pack(make_groups([(5, (4, 6)), (3, (7, 2)), (4, (3, 5)), (2, (2, 2))]))
    learner = make_learner(make_policy(torch.float32), batch=4, precision=precision, **split)
    learn = make_learn_batch(learner, batch, moved=0.0)
    for part in train_batches(batch, 4):
        before = learner._accumulate(take_streams(learn, part))[0].logprobs
        assert torch.equal(before, learn.proximal_logprobs[part.slots])


@pytest.mark.parametrize(("precision", "split"), [("fp32", SPLITS[2]), ("bf16", {})], ids=str)
@pytest.mark.parametrize(
    "objective",
    [{"loss": "reinforce", "kl": "k2"}, {}, {"ratio": "sequence"}, {"loss": "cispo"}],
    ids=str,
)
def test_a_single_step_needs_no_scores_of_the_policy(objective, precision, split, batch):
    """Metrics, drift, log-probabilities and weights are to the bit those with a recomputed proximal
    policy: the step's own forward pass runs the same packs on the same weights."""
    outcomes = []
    for recompute in (False, True):
        settings = {
            "precision": precision,
            "epochs": 1,
            "log_kl": True,
            "log_kl_responses": 5,
        } | split
        learner = make_learner(make_policy(torch.float32), objective, **settings)
        rows = []
        for _ in range(3):
            scores = learner.score(batch)
            assert scores.proximal is None
            if recompute:
                scores = scores._replace(proximal=learner.output(batch).logprobs)
            advantages = learner.program.advantages(batch, scores)
            whole = [Pack.whole(batch)]
            (learn,) = learner.program.batches(batch, advantages, scores, whole)
            metrics = learner.step(learn)
            drift, logprobs = learner.finish()
            if recompute:
                assert torch.equal(logprobs, scores.proximal)
            rows.append((metrics | drift, logprobs.tolist()))
        outcomes.append((rows, masters(learner)))
    (rows, weights), (want, same) = outcomes
    assert rows == want
    assert all(torch.equal(weights[name], same[name]) for name in same)
    metrics = rows[-1][0]
    assert metrics["train/ratio_min"] == metrics["train/ratio_max"] == 1.0
    assert metrics["kl/initial_k3"] > metrics["kl/previous_k3"] > 0


@pytest.mark.parametrize(
    ("objective", "train", "scored"),
    [
        ({"loss": "reinforce"}, {"epochs": 1}, False),
        ({"loss": "clip"}, {"epochs": 1}, False),
        ({"loss": "clip"}, {"epochs": 2}, True),
        ({"loss": "clip"}, {"epochs": 1, "batch": 4}, True),
        ({"loss": "reinforce", "importance": "mask"}, {"epochs": 1}, True),
        ({"loss": "reinforce", "kl": {"name": "k1", "where": "reward"}}, {"epochs": 1}, True),
        ({"loss": "reinforce", "kl": "k3"}, {"epochs": 1}, False),
    ],
    ids=str,
)
def test_what_reads_the_proximal_policy_has_it_scored(objective, train, scored, batch):
    learner = make_learner(make_policy(torch.float32), objective, **train)
    assert (learner.score(batch).proximal is not None) == scored


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_small_learning_rate_moves_the_masters(precision, batch):
    """A step of 1e-6 is below bfloat16's spacing: only the masters can remember it."""
    learner = make_learner(make_policy(torch.float32), precision=precision, learning_rate=1e-6)
    start = masters(learner)
    low = learner.weights().tensors
    for _ in range(3):
        learner.step(make_learn_batch(learner, batch))
    name = "model.layers.0.mlp.down_proj.weight"
    moved = (masters(learner)[name] - start[name]).abs()
    assert low[name].dtype == learner.policy.embed.weight.dtype != torch.float32
    assert (moved > 0).float().mean() > 0.95
    assert moved.max() < 4e-6
    same = (learner.weights().tensors[name] == low[name]).float().mean()
    assert same > 0.8
    for name, master in masters(learner).items():
        assert torch.equal(learner.weights().tensors[name], master.to(low[name].dtype))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_near_fp32(precision, batch):
    exact = make_learner(make_policy(torch.float32))
    rough = make_learner(make_policy(torch.float32), precision=precision)
    learn = make_learn_batch(exact, batch)
    want, got = exact.step(learn), rough.step(learn)
    assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.05)
    assert got["train/loss"] == pytest.approx(want["train/loss"], abs=0.05)


def test_the_loss_scale_drops_out_in_exact_arithmetic(batch):
    """A power of two only moves exponents: the scaled step is the plain step to the bit."""
    learners = [make_learner(make_policy(torch.float32), clip_norm=0.5) for _ in range(2)]
    learners[1].optimizer.is_scaled = True
    learners[1].optimizer.scale = 2.0**10
    learn = make_learn_batch(learners[0], batch)
    metrics = [learner.step(learn) for learner in learners]
    assert metrics[1].pop("train/loss_scale") == 2**10
    assert metrics[0] == metrics[1]
    for a, b in zip(*(learner.policy.parameters() for learner in learners), strict=True):
        assert torch.equal(a, b)


def test_an_fp16_overflow_is_skipped_and_halves_the_scale(batch):
    learner = make_learner(make_policy(torch.float32), precision="fp16", max_skipped=1)
    learn = make_learn_batch(learner, batch)
    learner.optimizer.scale = 2.0**30
    before = masters(learner)
    metrics = learner.step(learn)
    assert (metrics["train/skipped"], learner.version, learner.skipped_in_a_row) == (1, 0, 0)
    assert learner.optimizer.scale == 2.0**29
    assert "train/grad_norm" not in metrics
    for name, tensor in masters(learner).items():
        assert torch.equal(tensor, before[name])
    while learner.step(learn)["train/skipped"]:
        pass
    assert learner.version == 1
    assert 1 < learner.optimizer.scale < 2**29


def test_steps_that_are_not_finite_are_counted_and_then_halt(batch):
    learner = make_learner(make_policy(torch.float32), max_skipped=2)
    good, bad = make_learn_batch(learner, batch), make_learn_batch(learner, batch)
    bad.advantages[batch.is_action] = math.inf
    for _ in range(2):  # a good step between them starts the count anew
        metrics = learner.step(bad)
        assert metrics["train/skipped"] == 1
        assert all(map(math.isfinite, metrics.values()))
        assert learner.step(good)["train/skipped"] == 0
    assert learner.version == 2
    learner.step(bad)
    with pytest.raises(BurnishError, match=r"2 gradient steps in a row .* train\.max_skipped"):
        learner.step(bad)
    assert learner.version == 2


STATES = [
    {},
    {"precision": "bf16", "micro_tokens": 30, "schedule": "linear", "decay_steps": 9},
    {"precision": "fp16", "warmup_steps": 3, "log_kl": True, "weight_decay": 0.3, "eps": 1e-6},
]


def adaptive(**target):
    """An objective whose entropy coefficient rises by 0.1 in each step, from 0.1."""
    return {"entropy_coefficient": 0.1, "entropy": {"target": 9.0, "delta": 0.1} | target}


MOVING = [
    {"kl": {"name": "k3"}},
    {"kl": {"name": "k3", "refresh": 2}} | adaptive(),
    {"kl": {"name": "k3", "ema": 0.8}},
]


@pytest.mark.parametrize("objective", MOVING, ids=str)
@pytest.mark.parametrize("train", STATES, ids=str)
def test_a_loaded_state_goes_on_bit_for_bit(train, objective, batch):

    def run(learner, steps):
        rows = []
        for number in steps:
            learner.begin(number)
            metrics = learner.step(make_learn_batch(learner, batch))
            rows.append(learner.finish()[0] | metrics)
        return rows

    torch.use_deterministic_algorithms(True)
    try:
        never = make_learner(make_policy(torch.float32), objective, **train)
        rows = run(never, range(5))
        killed = make_learner(make_policy(torch.float32), objective, **train)
        run(killed, range(3))
        tensors, numbers = killed.state()
        saved = LearnerState(
            {name: tensor.clone() for name, tensor in tensors.items()}, dict(numbers)
        )
        resumed = make_learner(make_policy(torch.float32), objective, **train)
        resumed.load_state(saved)
        assert resumed.version == killed.version
        assert run(resumed, range(3, 5)) == rows[3:]
    finally:
        torch.use_deterministic_algorithms(False)
    a, b = never.state(), resumed.state()
    assert a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


def test_an_entropy_coefficient_is_the_same_for_any_split(batch):
    """The step with coefficient c is that of a constant coefficient c; packs only add up."""
    rows, weights = [], []
    for split in ({}, {"micro_tokens": 17}):
        learner = make_learner(make_policy(), adaptive(), **split)
        rows.append([learner.step(make_learn_batch(learner, batch)) for _ in range(3)])
        weights.append(masters(learner))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-9)
    for steps in rows:
        found = [row["train/entropy_coefficient"] for row in steps]
        assert found == pytest.approx([0.1, 0.2, 0.3], abs=1e-12)
    constant = make_learner(make_policy(), {"entropy_coefficient": 0.1})
    assert constant.step(make_learn_batch(constant, batch)) == {
        name: x for name, x in rows[0][0].items() if name != "train/entropy_coefficient"
    }


def averaged(decay=0.75):
    return {"kl": {"name": "k3", "coefficient": 0.3, "ema": decay}}


def learned_weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_reference_follows_the_policy_as_a_moving_average(precision, layers, batch):
    """Of the masters, after each gradient step, in float64 by hand; held in fp32 and rounded."""
    policy = make_policy(torch.float32, layers=layers)
    learner = make_learner(policy, averaged(), precision=precision, log_kl=True)
    learner.optimizer.scale = 1.0
    start = learned_weights(learner.optimizer.masters)
    want = {name: weight.double() for name, weight in start.items()}
    reference = dict(learner.reference.named_parameters())
    low = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for number in range(3):
        learner.begin(number)
        for _ in range(2):
            learner.step(make_learn_batch(learner, batch))
            for name, master in learned_weights(learner.optimizer.masters).items():
                want[name] = 0.75 * want[name] + 0.25 * master.double()
        state = learner.state().tensors
        for name, average in want.items():
            own = state[f"policy.reference.{name}"]
            assert own.dtype == torch.float32
            torch.testing.assert_close(own.double(), average, rtol=0, atol=1e-6)
            assert torch.equal(reference[name], own.to(low))
            assert not torch.equal(own, start[name])
    frozen = reference.keys() - want.keys()
    policy = dict(learner.policy.named_parameters())
    assert bool(frozen) == (layers is not None)
    assert all(reference[name] is policy[name] for name in frozen)
    # The KL is to the average, and the initial model is another copy.
    scores = learner.score(batch)
    assert learner.initial is not learner.reference
    initial = learner._rollout.others["initial"][1]
    assert (initial - scores.reference)[batch.is_action].abs().max() > 1e-3


def test_an_average_remembers_steps_below_the_precision_of_the_reference(batch):
    """Steps of 1e-6 are below bfloat16's spacing: only the average can show them."""
    learner = make_learner(
        make_policy(torch.float32), averaged(0.9), precision="bf16", learning_rate=1e-6
    )
    start = learned_weights(learner.optimizer.masters)
    for _ in range(3):
        learner.step(make_learn_batch(learner, batch))
    for name, weight in start.items():
        moved = (learner.state().tensors[f"policy.reference.{name}"] - weight).abs()
        assert 0 < moved.max() < 3e-6


def test_a_step_that_moves_no_policy_changes_neither_coefficient_nor_average(batch):
    """A step that is skipped, and a step of a critic that learns alone."""

    def moved(learner):
        state = learner.state()
        kept = {n: t.clone() for n, t in state.tensors.items() if n.startswith("policy.ref")}
        return state.numbers["program"]["entropy_coefficient"], kept

    objective = adaptive() | averaged()
    learner = make_learner(make_policy(), objective)
    learner.step(make_learn_batch(learner, batch))
    bad = make_learn_batch(learner, batch)
    bad.advantages[batch.is_action] = math.inf
    before, now = moved(learner), (learner.step(bad), moved(learner))[1]
    assert before[0] == now[0] == pytest.approx(0.2)
    assert all(torch.equal(tensor, now[1][name]) for name, tensor in before[1].items())
    warming = make_learner(make_policy(), objective, critic={"warmup_rollouts": 1})
    found = []
    for number in range(2):
        warming.begin(number)
        warming.score(batch)
        warming.step(make_learn_batch(warming, batch))
        found.append(moved(warming))
    assert [coefficient for coefficient, _ in found] == pytest.approx([0.1, 0.2])
    assert any(not torch.equal(tensor, found[1][1][n]) for n, tensor in found[0][1].items())
    for name, weight in learned_weights(make_policy()).items():
        assert torch.equal(found[0][1][f"policy.reference.{name}"], weight)
    assert "program" not in make_learner(make_policy()).state().numbers


def test_kl_to_the_initial_model_and_to_the_step_before(batch):
    learner = make_learner(make_policy(), log_kl=True, learning_rate=1e-3)
    history = []
    rows = []
    for _ in range(4):
        history.append(learner.output(batch).logprobs)
        learn = make_learn_batch(learner, batch)
        for _ in range(2):
            learner.step(learn)
        rows.append(learner.finish()[0])
    assert set(rows[0].values()) == {0.0}
    action, ids = batch.is_action, batch.sample_ids
    for step in (1, 2, 3):
        for name, other in {"initial": history[0], "previous": history[step - 1]}.items():
            x = (history[step] - other)[action]
            k3 = (-x).exp() + x - 1
            want = {f"kl/{name}_k1": x.mean(), f"kl/{name}_k3": k3.mean()}
            for k, value in {"k1": x, "k3": k3}.items():
                sums = [value[ids[action] == s].sum() for s in range(len(batch.rewards))]
                want[f"kl/{name}_{k}_response"] = torch.stack(sums).mean()
            for key, value in want.items():
                assert rows[step][key] == pytest.approx(value.item(), rel=1e-9), key
    assert rows[3]["kl/initial_k3"] > rows[3]["kl/previous_k3"] > 0


def test_kl_on_some_responses_and_shared_with_the_reference(batch):
    settings = {"log_kl": True, "log_kl_responses": 5, "learning_rate": 1e-3}
    learner = make_learner(make_policy(), {"kl": {"name": "k3", "refresh": 2}}, **settings)
    assert learner.reference is learner.initial
    learner.step(make_learn_batch(learner, batch))
    scores = learner.score(batch)
    got = learner.finish()[0]
    x = scores.proximal - scores.reference
    assert got["kl/initial_k1"] == pytest.approx(x[batch.is_action].mean().item(), rel=1e-9)
    assert got["kl/initial_k1"] == pytest.approx(
        learner.held_out_drift(batch)["kl/held_out_k1"], rel=1e-9
    )
    learner.begin(2)
    part = x[batch.is_action & (batch.sample_ids < 5)]
    learner.score(batch)
    again = learner.finish()[0]
    assert again["kl/initial_k1"] == pytest.approx(part.mean().item(), rel=1e-9)
    # In packs of other sizes: float64's last bits may differ.
    assert again["kl/previous_k1"] == pytest.approx(0, abs=1e-15)


def test_the_engine_samples_what_the_learner_learns_and_takes_its_weights():
    """Sampler and learner agree on every token, before and after a step."""
    engine = NativeEngine(make_policy(torch.float32), settings=EngineSettings(kv_bytes=1 << 20))
    learner = make_learner(make_policy(torch.float32), learning_rate=1e-3)
    for version in (0, 1):
        groups = []
        for index, (prompt, lengths) in enumerate([([3, 4, 5, 6], 3), ([7, 8], 4)]):
            params = SamplingParams(temperature=0.75, max_tokens=9)
            engine.submit(Request(f"r{index}", np.array(prompt, np.int32), lengths, params, index))
            done = []
            while engine.unfinished:
                done += engine.step()
            done.sort(key=lambda completion: completion.sample_index)
            grades = tuple(Grade(float(i)) for i in range(lengths))
            group = make_groups([(len(prompt), [1] * lengths)])[0]
            head = dataclasses.replace(group.prompt, token_ids=np.array(prompt, np.int32))
            groups.append(Group(index, head, tuple(done), grades))
        batch = pack(groups)
        assert set(batch.versions[batch.is_action].tolist()) == {version}
        scores = learner.score(batch)
        torch.testing.assert_close(scores.proximal, batch.behavior_logprobs, rtol=0, atol=2e-5)
        metrics = learner.step(make_learn_batch(learner, batch))
        assert metrics["mismatch/logprob_max"] < 2e-5
        engine.load(learner.weights())


KEPT = {"kl": {"name": "k3", "coefficient": 0.3}, "entropy_coefficient": 0.1}


@pytest.mark.parametrize("split", [{}, {"micro_tokens": 20}, {"batch": 5}], ids=str)
def test_the_last_layers_learn_as_they_do_when_all_learn(split, batch):
    """Gradients and metrics of the layers that learn; the hidden states below them are shared."""
    every, some = (make_learner(make_policy(layers=n), KEPT, **split) for n in (None, 1))
    learn = make_learn_batch(some, batch)
    assert some._rollout.lower is not None
    for part in train_batches(batch, some.train.batch):
        piece = take_streams(learn, part)
        want, *_ = every._accumulate(piece)
        got, *_ = some._accumulate(piece)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    gradients = {name: p.grad for name, p in every.policy.named_parameters()}
    learning = [name for name, p in some.policy.named_parameters() if p.requires_grad]
    assert {name.split(".")[0] for name in learning} == {"layers", "norm"}
    assert not any(name.startswith("layers.0.") for name in learning)
    for name, p in some.policy.named_parameters():
        if name in learning:
            torch.testing.assert_close(p.grad, gradients[name], rtol=0, atol=1e-12)
        else:
            assert p.grad is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_does_not_learn_stays_and_is_held_once(precision, batch):
    settings = {"precision": precision, "log_kl": True}
    learner = make_learner(make_policy(torch.float32, layers=1), KEPT, **settings)
    before = masters(learner)
    for _ in range(2):
        learner.step(make_learn_batch(learner, batch))
    after = masters(learner)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(("model.layers.1.", "model.norm.")) for name in changed)
    for copied in (learner.reference, learner.previous):
        for ours, theirs in zip(learner.policy.parameters(), copied.parameters(), strict=True):
            assert (ours is theirs) != ours.requires_grad
    state = learner.state()
    fresh = make_learner(make_policy(torch.float32, layers=1), KEPT, **settings)
    fresh.load_state(state)
    first, second = (one.step(make_learn_batch(one, batch)) for one in (learner, fresh))
    assert first == second
