import importlib.util
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch

from burnish.engine.sorter import SorterEngine
from burnish.errors import GraderError
from burnish.launch.settings import rollout_settings, step_settings
from burnish.learner import program as objective
from burnish.learner.learner import LocalLearner
from burnish.loops import sync
from burnish.model.sorter import Sorter
from burnish.recipe.load import load_recipe
from burnish.rl.reduce import weighted_sum
from burnish.rollout.packing import Pack, pack, train_batches
from burnish.runs.metrics import Timers
from burnish.tasks.sorting import Sorting
from burnish.tasks.stream import PromptStream
from burnish.types import Scores
from tests.conftest import aborted, make_group

ROOT = Path(__file__).parents[2]


def run(*overrides, seed=0, name="sort", sampler=SorterEngine, **how):
    recipe = load_recipe(name, [*overrides, {"seed": seed}])
    task = Sorting(recipe.task, seed=recipe.seed)
    size = (recipe.task.numbers, recipe.task.length, recipe.model.width)
    learner = LocalLearner(
        Sorter(*size, seed=recipe.seed), objective.compile(recipe.objective), recipe.train
    )
    engine = sampler(Sorter(*size, seed=recipe.seed))
    parts = {"prompts": PromptStream(task), "task": task, "engine": engine, "learner": learner}
    steps = sync.train_sync(
        rollout_settings(recipe),
        step_settings(recipe),
        recipe.train.steps,
        **parts,
        timers=Timers(),
        **how,
    )
    return list(steps), learner


def test_the_default_recipe_learns_to_sort():
    steps, _ = run()
    rewards = [step.metrics["rollout/reward"] for step in steps]
    assert np.mean(rewards[:5]) < 3.2
    assert np.mean(rewards[-5:]) > 4.7


@pytest.mark.slow
def test_a_larger_size_learns_too():
    steps, _ = run("train.steps=30", name="sort-large")
    assert steps[0].metrics["rollout/part_sorted"] < 0.01
    assert steps[-1].metrics["rollout/part_sorted"] > 0.9


@pytest.mark.parametrize(
    "change",
    [
        ["objective.advantage=raw", "objective.loss=reinforce"],
        ["objective.advantage=best_of_group", "objective.loss=unclipped"],
        ["objective.advantage=best_of_group", "objective.advantage.centered=true"],
        ["objective.advantage=group_zscore", "objective.ratio=sequence"],
        ["objective.advantage=leave_one_out", "objective.loss=cispo"],
        ["objective.advantage=reinforce_plus_plus", "objective.kl=k1", "objective.kl.where=reward"],
        ["objective.advantage=reinforce_plus_plus_baseline", "objective.importance=truncate"],
        ["objective.kl=k3", "objective.kl.refresh=2", "objective.entropy_coefficient=0.01"],
        ["objective.proximal=behavior", "objective.reduction=sequence_mean"],
        ["objective.reduction=constant", "objective.reduction.length=3", "train.batch=10"],
        ["train.precision=bf16", "train.micro_tokens=24", "train.log_kl=true"],
        ["train.precision=fp16", "train.schedule=linear", "train.decay_steps=30"],
    ],
)
def test_every_piece_runs_and_moves_the_policy(change):
    steps, learner = run("train.steps=3", *change)
    per_rollout = 30 if "train.batch=10" in change else 10
    assert learner.version == steps[-1].metrics["train/version"] == 3 * per_rollout
    assert all(np.isfinite(list(step.metrics.values())).all() for step in steps)
    assert steps[-1].metrics["train/grad_norm"] > 0


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    (a, first), (b, second), (c, _) = (run("train.steps=5", seed=s) for s in (1, 1, 2))
    assert [step.metrics for step in a] == [step.metrics for step in b]
    assert [step.metrics for step in a] != [step.metrics for step in c]
    for name, tensor in first.weights().tensors.items():
        assert torch.equal(tensor, second.weights().tensors[name])


def test_the_reference_is_refreshed_every_n_steps():
    change = ["objective.kl=k3", "objective.kl.coefficient=0.001", "train.epochs=1"]
    steps, _ = run(*change, "objective.kl.refresh=3", "train.steps=7")
    kl = [step.metrics["kl/reference_k3"] for step in steps]
    assert [value == 0 for value in kl] == [True, False, False, True, False, False, True]
    frozen, _ = run(*change, "train.steps=7")
    assert [step.metrics["kl/reference_k3"] == 0 for step in frozen] == [True] + [False] * 6


def test_generator_and_learner_stay_in_step():
    steps, _ = run("train.steps=4")
    for step in steps:
        assert step.metrics["train/lag"] == 0
        assert step.metrics["mismatch/logprob_max"] < 1e-6
    versions = [step.groups[0].completions[0].versions[0] for step in steps]
    assert versions == [0, 10, 20, 30]
    assert [group.index for step in steps for group in step.groups] == list(range(12))


def test_the_engine_rests_while_the_learner_works(monkeypatch):
    told = []
    for part, name in [(SorterEngine, "step"), (SorterEngine, "load"), (LocalLearner, "step")]:
        own = getattr(part, name)
        note = f"{part.__name__}.{name}"

        def noted(self, *given, own=own, note=note):
            told.append(note)
            return own(self, *given)

        monkeypatch.setattr(part, name, noted)

    @contextmanager
    def rest():
        told.append("rests")
        yield
        told.append("rested")

    run("train.steps=2", rest=rest)
    load, sample, learn = "SorterEngine.load", "SorterEngine.step", "LocalLearner.step"
    assert [name for name, _ in groupby(told)] == [
        load,
        *[sample, "rests", learn, "rested", load] * 2,
    ]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("loss", ["reinforce", "clip"])
def test_the_policy_is_scored_only_where_a_step_does_not_do_it_anyway(loss, epochs, monkeypatch):
    """Everything a step leaves is the same as if it had been scored before."""
    change = [f"objective.loss={loss}", f"train.epochs={epochs}", "train.log_kl=true"]
    passes = []
    real = Sorter.score

    def counted(self, batch, *lower):
        passes.append(torch.is_grad_enabled())
        return real(self, batch, *lower)

    monkeypatch.setattr(Sorter, "score", counted)
    steps, learner = run("train.steps=4", *change)
    others = 2 * 4  # the initial model and the one before
    assert passes.count(False) == others + (4 if epochs > 1 else 0)
    assert passes.count(True) == 4 * epochs
    plain = LocalLearner.score

    def scored(self, *given):
        return plain(self, *given)._replace(proximal=self.output(given[0]).logprobs)

    monkeypatch.setattr(LocalLearner, "score", scored)
    again, other = run("train.steps=4", *change)
    for a, b in zip(steps, again, strict=True):
        assert a.metrics == b.metrics
        assert a.metrics["mismatch/logprob_max"] < 1e-6
        for x, y in zip(a.learner_logprobs, b.learner_logprobs, strict=True):
            np.testing.assert_array_equal(x, y)
    for name, tensor in learner.weights().tensors.items():
        assert torch.equal(tensor, other.weights().tensors[name])


def test_responses_that_teach_nothing_are_left_out_and_change_nothing(monkeypatch):
    """Whole groups of equal reward, or all but the best: the gradient is that of all of them."""
    change = ["train.steps=4", "train.batch=10", "train.epochs=2", "objective.loss.high=0.2"]
    seen = []
    real = LocalLearner.step

    def step(self, learn):
        seen.append(len(learn.batch.rewards))
        return real(self, learn)

    monkeypatch.setattr(LocalLearner, "step", step)
    steps, learner = run(
        *change, "objective.advantage=best_of_group", "objective.advantage.centered=true"
    )
    assert min(seen) < 10
    monkeypatch.setattr(objective, "live", lambda batch: batch)
    seen.clear()
    plain, other = run(
        *change, "objective.advantage=best_of_group", "objective.advantage.centered=true"
    )
    assert set(seen) == {10}
    for a, b in zip(steps, plain, strict=True):
        assert a.metrics["train/loss"] == pytest.approx(b.metrics["train/loss"], abs=1e-6)
        assert a.metrics["rollout/reward"] == b.metrics["rollout/reward"]
    for name, tensor in learner.weights().tensors.items():
        torch.testing.assert_close(tensor, other.weights().tensors[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("term", ["objective.entropy_coefficient=0.01", "objective.kl=k3"])
def test_a_term_of_its_own_keeps_every_response(term, monkeypatch):
    monkeypatch.setattr(objective, "live", lambda batch: pytest.fail("a term is lost"))
    run("train.steps=1", "train.batch=10", "objective.advantage=group_zscore", term)


def test_one_pass_of_grpo_clip_is_one_step_of_the_policy_gradient():
    """At a ratio of 1 nothing is clipped, so the classic comparison begins at the plain recipe."""
    learners = [
        run("train.steps=3", "train.epochs=1", f"objective.loss={loss}", "objective.kl=k2")[1]
        for loss in ("reinforce", "clip")
    ]
    plain, clipped = (learner.weights().tensors for learner in learners)
    for name, tensor in plain.items():
        torch.testing.assert_close(clipped[name], tensor, rtol=0, atol=1e-6)


def test_what_the_sampler_says_is_not_shown_as_the_learners():
    steps, _ = run("train.steps=1", "train.batch=10", "objective.proximal=behavior")
    assert steps[0].learner_logprobs is None
    steps, _ = run("train.steps=1", "objective.proximal=behavior", "train.precision=bf16")
    own = np.concatenate(steps[0].learner_logprobs)
    sampled = np.concatenate([c.logprobs for g in steps[0].groups for c in g.completions])
    np.testing.assert_allclose(own, sampled, atol=0.1)
    assert not np.array_equal(own, sampled)


def test_skipped_steps_are_counted(monkeypatch):
    """fp16 begins by looking for its loss scale: how many steps that takes is a number of steps."""
    from burnish.learner import optimizer as optim

    monkeypatch.setattr(optim, "FIRST_SCALE", 2.0**40)
    steps, learner = run("train.steps=1", "train.precision=fp16", "train.epochs=40")
    skipped = steps[0].metrics["train/skipped"]
    assert skipped == 40 - learner.version > 1


def overflowing(lost):
    """A sampler that aborts samples without a token: those of whom lost(group, sample) says so."""

    class Overflowing(SorterEngine):
        def step(self):
            return [
                aborted(c) if lost(int(c.request_id.split("-")[1]), c.sample_index) else c
                for c in super().step()
            ]

    return Overflowing


def test_a_sample_that_the_engine_aborted_is_not_learned_from():
    steps, _ = run("train.steps=2", sampler=overflowing(lambda group, sample: sample == 3))
    for step in steps:
        assert step.metrics["rollout/aborted"] == pytest.approx(0.1)
        assert step.metrics["rollout/dropped_samples"] == 3
        for k, group in enumerate(step.groups):
            assert [c.sample_index for c in group.completions] == [0, 1, 2, *range(4, 10)]
            centred = group.rewards - group.rewards.mean()
            np.testing.assert_allclose(step.advantages[9 * k : 9 * k + 9], centred, atol=1e-6)


@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
def test_dropped_samples_leave_the_gradient_steps_that_were_planned(proximal):
    change = ["train.steps=2", "train.batch=10", "train.epochs=2", "train.log_kl=true"]
    change += [f"objective.proximal={proximal}"]
    sampler = overflowing(lambda group, sample: group % 3 == 0 and sample == 3)
    steps, learner = run(*change, sampler=sampler)
    assert learner.version == 2 * load_recipe("sort", change).gradient_steps_per_rollout == 12
    assert [step.metrics["train/skipped"] for step in steps] == [0, 0]


def test_a_group_that_is_gone_leaves_fewer_gradient_steps_and_they_are_counted():
    change = ["train.steps=1", "train.batch=10", "train.epochs=2", "rollout.max_errors=0.4"]
    steps, learner = run(*change, sampler=overflowing(lambda group, sample: group == 1))
    assert (learner.version, steps[0].metrics["train/skipped"]) == (4, 2)
    assert [group.index for group in steps[0].groups] == [0, 2]


def test_a_rollout_that_is_lost_is_counted_and_takes_no_gradient_step():
    lost = overflowing(lambda group, sample: group in (3, 4, 5))
    steps, learner = run("train.steps=3", "rollout.max_errors=1", "train.log_kl=true", sampler=lost)
    assert [step.metrics["train/version"] for step in steps] == [10, 10, 20]
    assert [step.metrics["train/skipped"] for step in steps] == [0, 10, 0]
    empty = steps[1]
    assert (empty.number, empty.groups, empty.advantages) == (2, (), ())
    assert empty.learner_logprobs is None
    assert empty.metrics["rollout/dropped_groups"] == 3
    assert empty.metrics["rollout/dropped_samples"] == 30
    assert all(np.isfinite(list(step.metrics.values())).all() for step in steps)
    assert learner.version == 20


def test_a_rollout_that_is_lost_still_halts_where_errors_are_few():
    with pytest.raises(GraderError, match="30 of 30 responses"):
        run("train.steps=1", sampler=overflowing(lambda group, sample: True))


def test_drift_is_measured_on_fresh_rollouts():
    steps, _ = run("train.steps=4", "train.log_kl=true")
    assert steps[0].metrics["kl/initial_k3"] == steps[0].metrics["kl/previous_k3"] == 0
    initial, previous = (
        [step.metrics[f"kl/{name}_k3"] for step in steps] for name in ("initial", "previous")
    )
    assert initial[1] == previous[1] > 0
    assert initial[3] > previous[3] > 0


def test_train_batches_have_their_own_denominators():
    recipe = load_recipe("sort")
    groups = [
        make_group(i, [1, 2], [[3, 4, 5], [3]] * 5, [1.0, 0.0] * 5) for i in range(3)
    ]  # 10 responses each
    batch, program = pack(groups), objective.compile(recipe.objective)
    scores = Scores(batch.behavior_logprobs)
    advantages = program.advantages(batch, scores)
    parts = program.batches(batch, advantages, scores, train_batches(batch, 10))
    assert len(parts) == 3
    for part in parts:
        ones = torch.ones_like(part.loss_weight)
        assert weighted_sum(ones, part.loss_weight).item() == pytest.approx(1.0)


def one_file():
    spec = importlib.util.spec_from_file_location("one", ROOT / "examples" / "grpo_one_file.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_one_file_example_learns_and_is_short():
    example = one_file()
    assert len((ROOT / "examples" / "grpo_one_file.py").read_text().splitlines()) <= 200
    history = example.train(example.Sorter(), steps=60)
    assert np.mean(history[-5:]) > np.mean(history[:5]) + 0.5


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_one_step_of_the_example_equals_one_step_of_the_package(kl):
    """Same weights, same responses, two gradient steps: the same weights afterwards."""
    example = one_file()
    ours, theirs = Sorter(5, 3, 10, seed=4), example.Sorter(seed=4)
    responses = example.sample(theirs, example.PROMPTS, 10, torch.Generator().manual_seed(0))
    rewards = example.grade(example.PROMPTS, responses)
    groups = [
        make_group(i, p.tolist(), r.tolist(), s.tolist())
        for i, (p, r, s) in enumerate(zip(example.PROMPTS, responses, rewards, strict=True))
    ]
    change = ["objective.advantage=group_zscore", "train.epochs=2"]
    change += ["objective.kl=k3", f"objective.kl.coefficient={kl}"] if kl else []
    recipe = load_recipe("sort", change)
    learner = LocalLearner(ours, objective.compile(recipe.objective), recipe.train)
    batch = pack(groups)
    scores, parts = learner.score(batch), [Pack.whole(batch)]
    advantages = learner.program.advantages(batch, scores)
    (learn,) = learner.program.batches(batch, advantages, scores, parts)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-3)
    old = example.log_probs(theirs, example.PROMPTS, responses).detach()
    for _ in range(2):
        metrics = learner.step(learn)
        loss = example.grpo_loss(
            example.log_probs(theirs, example.PROMPTS, responses),
            old,
            example.advantages(rewards),
            clip=0.01,
            reference=old if kl else None,
            kl_coefficient=kl,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-7)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(learner.policy.state_dict()[name], tensor, rtol=0, atol=1e-6)
