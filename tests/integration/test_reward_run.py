"""A reward learned from preferences: its loss, its run, its export, and its use in a rollout."""

import json
import math

import pytest
import tiny as small
import torch

from burnish import api, build, config, preflight
from burnish.errors import ConfigError, DataError, ModelError
from burnish.learner.learner import Learner
from burnish.learner.preferences import Preferences
from burnish.loops import supervised
from burnish.model import checkpoint, reward
from burnish.model.reward import RewardModel, ends
from burnish.plan import plan
from burnish.rl.preferences import bradley_terry
from burnish.rollout.packing import pack
from burnish.runs import checkpoints
from burnish.schema.recipe import TrainConfig
from burnish.schema.tasks import PreferencesTask
from burnish.tasks.pairs import Pairs, check_preference, write_pair
from tests.loops.test_recorder import fingerprint, one_thread, stopper  # noqa: F401

ROWS = [
    {"prompt": f"Say {n}", "chosen": "a" * (n + 1), "rejected": "b" * (1 + n % 3)}
    for n in range(12)
]


def groups(rows=ROWS, *, context=90, together=None):
    config, tokenizer = PreferencesTask(chat=False), small.tokenizer()
    checked = [check_preference(row, f"row {i}") for i, row in enumerate(rows)]
    return [write_pair(row, config, tokenizer, context, together) for row in checked]


def make_model(dtype=torch.float64, seed=1, pad=None):
    model = RewardModel(small.model(seed), pad).to(dtype)
    model.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
    return model


def make_learner(model, **train):
    return Learner(model, Preferences(), TrainConfig(**{"clip_norm": 1e9} | train))


def one_by_one(model, rows):
    """The reward of each text, alone and unpacked, read at its last token."""
    found = []
    for group in rows:
        for completion in group.completions:
            ids = torch.tensor([*group.prompt.token_ids, *completion.token_ids], dtype=torch.long)
            places = torch.arange(len(ids))
            hidden = model.body(ids, places, small.causal([len(ids)], ids.device))
            is_text = ids != (-1 if model.pad is None else model.pad)
            found.append(hidden[is_text.nonzero().max()] @ model.weight[0])
    return torch.stack(found)


def test_bradley_terry():
    """−log σ(0) = log 2; −log σ(log 3) = log 4/3, with gradient −σ(−log 3) = −1/4."""
    chosen = torch.tensor([0.5, math.log(3), 800.0], requires_grad=True)
    got = bradley_terry(chosen, torch.tensor([0.5, 0.0, -800.0]))
    torch.testing.assert_close(got, torch.tensor([math.log(2), math.log(4 / 3), 0.0]))
    got.sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([-0.5, -0.25, 0.0]))


@pytest.mark.parametrize("pad", [None, small.END])
def test_rewards_are_read_at_the_last_token(pad):
    model, rows = make_model(pad=pad), groups()
    batch = pack(rows)
    got = model.score(batch).logprobs
    torch.testing.assert_close(got[ends(batch)], one_by_one(model, rows), rtol=1e-9, atol=1e-9)
    assert got.count_nonzero() == len(ends(batch))


@pytest.mark.parametrize(
    "split", [{}, {"micro_tokens": 60}, {"micro_sequences": 2}, {"micro_sequences": 3}]
)
def test_the_loss_is_the_mean_over_pairs_however_it_is_cut(split):
    model, rows = make_model(), groups()
    scores = one_by_one(model, rows)
    expected = bradley_terry(scores[0::2], scores[1::2]).mean()
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    learner = make_learner(model, **split)
    learner.optimizer.drop_gradients()
    learn = supervised.to_learn(learner, rows)
    measured, *_, loss = learner._accumulate(learn)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-5, atol=1e-7)
    metrics = learner.program.metrics(measured, learn)
    wins = (scores[0::2] > scores[1::2]).double().mean().item()
    assert metrics["train/accuracy"] == pytest.approx(wins)
    held_out = supervised.validate(
        supervised.measure_preferences, Pairs([], rows, 1.0, 0), learner
    )[1]
    assert held_out["validation/accuracy"] == pytest.approx(wins)
    assert held_out["validation/loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_rows_that_are_no_pairs_are_refused():
    for change, said in (
        ({"chosen": ""}, "needs a text 'chosen'"),
        ({"rejected": 3}, "needs a text 'rejected'"),
        ({"rejected": ROWS[0]["chosen"]}, "are the same text"),
    ):
        with pytest.raises(DataError, match=f"row 0: .*{said}"):
            groups([ROWS[0] | change])
    with pytest.raises(DataError, match=r"its longest response are 19 tokens, .* is 18"):
        groups(context=18)
    with pytest.raises(DataError, match=r"all its responses are 23 tokens, .* is 22"):
        groups(together=22)


@pytest.fixture
def base(tmp_path):
    """A model directory with a tokenizer of bytes and settings of a run that learns a reward."""
    checkpoint.save(small.model(4), tmp_path / "base")
    small.tokenizer().save(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 4))
    return [
        f"model.name={tmp_path / 'base'}", f"task.train={tmp_path / 'rows.jsonl'}", "device=cpu",
        "task.chat=false", "task.epochs=4", "train.batch=8", "train.learning_rate=3e-3",
        "validation.every=8", "checkpoint.every=4",
    ]  # fmt: skip


def test_a_run_learns_to_rank_resumes_and_is_read_by_transformers(base, tmp_path):
    whole = api.train("reward", overrides=base, out=tmp_path / "whole", show=False)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["validation/loss"] == pytest.approx(math.log(2))  # all rewards start at 0
    assert rows[-1]["validation/accuracy"] == 1.0
    path = tmp_path / "run"
    api.train("reward", overrides=base, out=path, stop=stopper(6), show=False)
    api.resume(path, show=False)
    assert fingerprint(path) == fingerprint(whole)
    chosen = api.export(path, tmp_path / "model", show=False)
    model = reward.load(tmp_path / "model", dtype=torch.float64)
    assert torch.equal(model.weight.float(), checkpoints.load(chosen)[0]["policy.master.weight"])
    assert model.pad == small.END
    with pytest.raises(ConfigError, match="write it with: burnish export"):
        preflight.origin(config.load("keywords", [f"model.name={path}"]))
    transformers = pytest.importorskip("transformers", reason="an extra")
    kind = transformers.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    sides = [(g.prompt.token_ids, c.token_ids) for g in groups() for c in g.completions]
    width = max(len(p) + len(c) for p, c in sides)
    padded = torch.full((len(sides), width), small.END)
    for row, (p, c) in zip(padded, sides, strict=True):
        row[: len(p) + len(c)] = torch.tensor([*p, *c])
    with torch.no_grad():
        got = theirs(padded, attention_mask=padded != small.END).logits.squeeze(1)
        ours = model.score(pack(groups())).logprobs[ends(pack(groups()))]
    torch.testing.assert_close(got, ours, rtol=1e-6, atol=1e-6)


def test_a_learned_reward_scores_a_rollout(base, tmp_path):
    model = make_model(torch.float32, pad=small.END)
    model.save(tmp_path / "learned", source=tmp_path / "base")
    asked = [
        f"model.name={tmp_path / 'base'}", "task.chat=false", "device=cpu", "rollout.batch=8",
        "rollout.group_size=4", "rollout.max_tokens=5", "train.batch=8", "train.steps=2",
        "task.validation_prompts=2", "objective.kl=none", "task.most=1", "task.least=1",
        f"reward_model.name={tmp_path / 'learned'}", "reward_model.task=0.5",
        "train.precision=fp32", "train.micro_tokens=90", "validation.max_tokens=5",
    ]  # fmt: skip
    recipe = config.load("keywords", asked)
    task, _ = build.build_task(recipe)
    rows = groups()
    pairs = [(g.prompt, c) for g in rows for c in g.completions]
    torch.testing.assert_close(
        torch.tensor(task.rewards(pairs)), one_by_one(model, rows).detach(), rtol=1e-5, atol=1e-5
    )
    run = api.train("keywords", overrides=asked, out=tmp_path / "run", show=False)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    own, learned = row["rollout/part_task"], row["rollout/part_learned"]
    assert row["rollout/reward"] == pytest.approx(learned + 0.5 * own)
    shown = str(plan(recipe, tmp_path))
    assert "learned(prompt, response) + 0.5 × the task's reward" in shown
    with pytest.raises(ModelError, match=r"no score\.weight of one row"):
        build.build_task(
            config.load("keywords", [*asked, f"reward_model.name={tmp_path / 'base'}"])
        )


def test_what_goes_together():
    with pytest.raises(ConfigError, match="the sorting model has no"):
        config.load("sort", ["reward_model.name=x"])
    with pytest.raises(ConfigError, match="'none' leaves nothing to learn from"):
        config.load("keywords", ["task=files", "task.train=x", "task.reward=none"])
    config.load(
        "keywords", ["task=files", "task.train=x", "task.reward=none", "reward_model.name=x"]
    )
    with pytest.raises(ConfigError, match="no effect with task"):
        config.load("reward", ["reward_model.name=x"])
    told = r"train\.micro_sequences = 1 would part the two responses of a pair.*use at least 2"
    sequences = {"task.train": "x", "train.micro_tokens": None, "train.micro_sequences": 2}
    config.load("reward", sequences)
    with pytest.raises(ConfigError, match=told):
        config.load("reward", sequences | {"train.micro_sequences": 1})
