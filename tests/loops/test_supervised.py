"""A supervised run: the loss it claims, resumed bit for bit, handed on; and rows it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny as small
import torch
import torch.nn.functional as F

from burnish import api
from burnish.errors import ConfigError, DataError
from burnish.learner.learner import LocalLearner
from burnish.loops import supervised
from burnish.model.attention import causal
from burnish.model.checkpoint import load_model
from burnish.recipe.load import load_recipe, with_steps
from burnish.recipe.plan import make_plan
from burnish.recipe.recipe import TrainConfig
from burnish.recipe.tasks import PairsTask
from burnish.runs import checkpoints
from burnish.runs.metrics import Timers
from burnish.runs.report import write_report
from burnish.tasks.pairs import Pairs, check_pair, write_pair
from burnish.tasks.rows import DataRow, read_rows
from tests.loops.test_recorder import fingerprint, one_thread, stopper  # noqa: F401

ROWS = [{"prompt": f"Count to {n}", "answer": " ".join(map(str, range(n + 1)))} for n in range(9)]


def make(rows, validation=(), *, longest=90, **settings):
    config = PairsTask(**{"chat": False} | settings)
    tokenizer = small.tokenizer()
    parts = (
        [write_pair(with_place(row), config, tokenizer, longest) for row in part]
        for part in (rows, validation)
    )
    return Pairs(*parts, config.epochs, seed=3)


def with_place(row):
    return row if isinstance(row, DataRow) else check_pair(row, row["prompt"])


def make_learner(dtype, **train):
    return LocalLearner(
        small.model(1).to(dtype), supervised.PROGRAM, TrainConfig(**{"clip_norm": 1e9} | train)
    )


def padded_loss(model, groups):
    """Rows padded on the right, prompts and padding ignored: what everybody writes."""
    rows = [(g.prompt.token_ids.tolist(), g.completions[0].token_ids.tolist()) for g in groups]
    width = max(len(p) + len(a) for p, a in rows)
    logits, labels = [], []
    for prompt, answer in rows:
        ids = torch.tensor(prompt + answer + [0] * (width - len(prompt) - len(answer)))
        hidden = model(ids, torch.arange(width), causal([width], ids.device))
        logits.append(model.logits(hidden))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
        labels[-1] = F.pad(labels[-1], (0, width - len(labels[-1])), value=-100)
    logits, labels = torch.stack(logits), torch.stack(labels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("micro", [{}, {"micro_tokens": 60}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_loss_is_the_cross_entropy_of_the_answers(dtype, micro):
    learner = make_learner(dtype, **micro)
    groups = make(ROWS).batch(0, 6)
    model = learner.policy
    expected = padded_loss(model, groups)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    learner.optimizer.drop_gradients()
    learn = supervised.make_learn_batch(learner, groups)
    *_, loss = learner._accumulate(learn)
    close = {"rtol": 2e-6, "atol": 1e-7} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    assert loss == pytest.approx(expected.item(), rel=close["rtol"])
    for ours, theirs in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(ours.grad, theirs, **close)
    learner.optimizer.drop_gradients()
    rows = make(ROWS[:1], [ROWS[i] for i in (1, 2, 5)])
    held_out = supervised.validate_supervised(rows, learner)[1]
    rows = make([ROWS[i] for i in (1, 2, 5)]).rows
    assert held_out["validation/loss"] == pytest.approx(padded_loss(model, rows).item(), rel=1e-5)


def test_the_end_token_is_learned_and_what_looks_like_it_in_a_prompt_is_not():
    (group,) = make([{"prompt": "say <|end|>", "answer": "no <|end|> yet"}]).rows
    assert small.END not in group.prompt.token_ids  # texts of rows have no control tokens
    answer = group.completions[0]
    assert answer.token_ids.tolist().count(small.END) == 1
    assert answer.token_ids[-1] == small.END
    learn = supervised.make_learn_batch(make_learner(torch.float32), [group])
    assert learn.batch.is_action.sum() == len(answer.token_ids)
    assert not learn.batch.is_action[: len(group.prompt.token_ids)].any()
    assert learn.loss_weight.sum().item() == pytest.approx(1.0)


def test_every_epoch_sees_every_row_once_and_the_last_batch_may_be_short():
    pairs = make(ROWS, epochs=2)
    assert pairs.steps(4) == 5
    seen = [group.prompt.prompt_id for n in range(5) for group in pairs.batch(n, 4)]
    assert [len(set(seen[:9])), len(set(seen[9:])), len(seen)] == [9, 9, 18]
    assert seen[:9] != seen[9:]
    assert make(ROWS, epochs=0.5).steps(4) == 1


def test_marks_templates_and_questions(tmp_path):
    row = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24 clips, a << b >> c\n#### 24"}
    checked = check_pair(row, "here")
    (group,) = make([checked], prompt="Question: {prompt}\nAnswer:", answer=" {answer}").rows
    assert group.prompt.text == "Question: How many?\nAnswer:"
    assert group.completions[0].text == " 48/2 = 24 clips, a << b >> c\n#### 24"


@pytest.mark.parametrize("answer", ['"answer": ""', '"answer": " "', '"answer": 3', '"x": 1'])
def test_a_row_without_an_answer_is_refused(answer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", ' + answer + "}\n")
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: .*(needs a text|no field) 'answer'"):
        read_rows(file, check_pair)


def test_a_row_that_is_too_long_is_refused(tmp_path):
    said = "the prompt and its longest response are 28 tokens, .* is 27"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 9: {said}"):
        make(read_rows(file, check_pair), longest=27)


def settings(smollm2, tmp_path, *more):
    rows = [json.dumps(row) + "\n" for row in ROWS * 4]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    size = {"layers": 2, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    model = [f"model.{key}={value}" for key, value in size.items()]
    return [
        "model.name=scratch", f"model.tokenizer={smollm2}", *model, "device=cpu",
        f"task.train={tmp_path / 'rows.jsonl'}", "task.epochs=2", "train.batch=8",
        "train.learning_rate=1e-2", "checkpoint.every=2", "validation.every=3", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_learns_resumes_bit_for_bit_and_is_handed_on(smollm2, tmp_path):
    given = settings(smollm2, tmp_path, "train.weight_decay=0.1")
    whole = api.train("sft", overrides=given, out=tmp_path / "whole")
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    losses = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["step"] for row in rows if "validation/loss" in row] == [0, 3, 6, 8]
    assert losses[-1] < losses[0] - 2
    assert rows[-1]["train/learning_rate"] == pytest.approx(1e-2 / 8)
    path = api.train("sft", overrides=given, out=tmp_path / "run", stop=stopper(3))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tra')
    api.resume(path)
    assert fingerprint(path) == fingerprint(whole)
    assert '"validation/loss":{' in write_report(path.path).read_text()
    best = checkpoints.best(path)
    assert -checkpoints.read_info(best).score == min(losses)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["validation"]["best"] == min(losses)
    assert summary["loss_first"] == pytest.approx(np.mean([r["train/loss"] for r in rows[1:3]]))
    api.export(path, tmp_path / "model")
    exported = dict(load_model(tmp_path / "model").named_parameters())
    learned, _ = checkpoints.load_checkpoint(best)
    for name, tensor in exported.items():
        assert torch.equal(tensor.data, learned[f"policy.master.{name}"])
    small_run = ["rollout.batch=4", "rollout.group_size=2", "train.batch=4", "train.steps=1"]
    small_run += ["rollout.max_tokens=4", "task.validation_prompts=2", "device=cpu"]
    figures = []
    for source in (path, tmp_path / "model"):
        named = [f"model.name={source}", *small_run]
        trained = api.train(
            "keywords", overrides=named, out=tmp_path / f"after-{Path(source).name}"
        )
        figures.append((trained / "metrics.jsonl").read_text())
    assert figures[0] == figures[1]


def test_what_has_no_effect_and_what_is_missing_is_refused(tmp_path):
    for setting in ("train.steps=3", "rollout.batch=8", "objective.kl=k3", "train.epochs=2"):
        with pytest.raises(ConfigError, match=r'has no effect with task\.name = "pairs"'):
            load_recipe("sft", [setting])
    with pytest.raises(ConfigError, match="there are no prompts; give --data"):
        api.sft("keywords", out=tmp_path / "none")
    changes = [{"task": "pairs", "model": "other"}, "train.schedule=linear"]
    recipe = api.recipe_of("keywords", changes, data=tmp_path)
    assert (recipe.task.validation, recipe.model.name) == (f"{tmp_path}/validation.jsonl", "other")
    shown = str(make_plan(recipe, tmp_path))
    assert "1 × the rows, 32 at a time (AdamW, learning rate 4e-05, linear)" in shown


def test_tokens_are_counted():
    pairs = make(ROWS)
    learner = make_learner(torch.float32, batch=4)
    recipe = with_steps(load_recipe("sft", ["train.batch=4"]), pairs.steps(4))
    steps = list(
        supervised.train_supervised(
            recipe.train.steps, recipe.train.batch, pairs=pairs, learner=learner, timers=Timers()
        )
    )
    counted = sum(step.metrics["train/tokens"] for step in steps)
    assert counted == sum(len(g.completions[0].token_ids) for g in pairs.rows)
    assert not any(name.startswith("mismatch/") for step in steps for name in step.metrics)
