import dataclasses
import json

import pytest

from burnish import api
from burnish.errors import ConfigError
from burnish.launch.settings import make_evaluator
from burnish.loops.evaluate import validation_metrics
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.recipe.tasks import KeywordsTask, MathTask
from burnish.rollout.packing import pack
from burnish.rollout.rollout import describe, grade
from burnish.tasks.keywords import make_keywords
from burnish.tasks.math import make_math
from burnish.tasks.mixture import Mixture
from tests.conftest import byte_tokenizer, make_group


def write(tmp_path):
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def make(tmp_path, seed=0, weights=(3, 1)):
    made = {"tokenizer": byte_tokenizer(), "seed": seed}
    asked = MathTask(train=write(tmp_path), prompt="question_only", answer="last_number")
    parts = {
        "sums": make_math(asked, **made),
        "words": make_keywords(KeywordsTask(validation_prompts=2), **made),
    }
    return Mixture(parts, dict(zip(parts, weights, strict=True)), seed=seed)


def test_groups_are_drawn_by_weight_and_no_row_is_skipped(tmp_path):
    task = make(tmp_path)
    prompts = [task.prompt(i) for i in range(400)]
    names = [prompt.part for prompt in prompts]
    assert 260 < names.count("sums") < 340
    sums = [p for p in prompts if p.part == "sums"]
    rows = 9
    for epoch in range(10):
        seen = {p.prompt_id for p in sums[epoch * rows : (epoch + 1) * rows]}
        assert len(seen) == rows
    again = make(tmp_path)
    for i in (399, 0, 63, 64, 3):  # in any order: the prompt is a function of its index
        assert again.prompt(i).prompt_id == prompts[i].prompt_id
    assert [make(tmp_path, seed=1).prompt(i).part for i in range(400)] != names
    words = next(p for p in prompts if p.part == "words")
    assert words.prompt_id == "words/keywords/train/0"


def test_each_part_grades_its_own_and_has_its_metrics(tmp_path):
    task = make(tmp_path)
    prompts = task.validation
    assert [p.part for p in prompts] == ["sums", "words", "words"]
    prompts = [prompts[1], prompts[0], prompts[2]]
    (base,) = make_group(0, [1], [[1]], [0]).completions
    (right,) = prompts[1].reference["answer"]
    texts = [" ".join(prompts[0].reference["keywords"]), right, "nothing"]
    responses = [(dataclasses.replace(base, text=text),) for text in texts]
    groups = grade(task, list(enumerate(prompts)), responses)
    assert [group.grades[0].reward for group in groups] == [1, 1, 0]
    metrics = describe(groups)
    assert metrics["rollout/reward/sums"] == 1
    assert metrics["rollout/reward/words"] == 0.5
    assert metrics["rollout/reward"] == pytest.approx(2 / 3)
    task.close()


def test_scales_are_learned_and_not_shown(tmp_path):
    made = make(tmp_path)
    task = Mixture(made.parts, {"sums": 1.0, "words": 1.0}, {"words": 0.25}, seed=0)
    asked = [task.prompt(i) for i in range(20)]
    groups = [
        dataclasses.replace(make_group(i, [1], [[1], [2]], [0.0, 2.0]), prompt=prompt)
        for i, prompt in enumerate(asked)
    ]
    for group in groups:  # 2 · 1/4 = 1/2
        learned = pack([group]).rewards.tolist()
        assert learned == ([0, 0.5] if group.prompt.part == "words" else [0, 2])
        assert group.rewards.tolist() == [0, 2]
    metrics = describe(groups)
    assert metrics["rollout/reward/words"] == metrics["rollout/reward/sums"] == 1
    assert {prompt.scale for prompt in task.validation} == {1.0}
    task.close()


def test_a_majority_counts_each_parts_own_answers(tmp_path):
    task = make(tmp_path)
    sums, words, _ = task.validation
    (right,) = sums.reference["answer"]
    completions = make_group(0, [1], [[1], [2], [3]], [0, 0, 0]).completions
    said = [f"It is {right}", "0", f"so {right}"]
    texts = [dataclasses.replace(c, text=text) for c, text in zip(completions, said, strict=True)]
    evaluator = make_evaluator(load_recipe("keywords"), task, engine=None, decode=lambda ids: [""])
    rows = evaluator.rows(grade(task, [(0, sums), (1, words)], [tuple(texts)] * 2))
    assert [row["answer"] for row in rows] == [right, "0", right, *said]
    assert validation_metrics(rows[:3])["validation/majority_at_3"] == 1
    task.close()


MIXTURE = """
[task]
name = "mixture"
weights = {sums = 3, words = 1}
tasks.sums = {name = "math", train = "TRAIN", prompt = "r1_zero", workers = 1}
tasks.words = {name = "keywords", validation_prompts = 2}
[model]
name = "scratch"
layers = 1
width = 32
heads = 4
d_ff = 48
context = 512
[rollout]
batch = 8
group_size = 2
max_tokens = 4
[engine]
kv_mb = 64
precision = "fp32"
[train]
steps = 2
batch = 8
"""


@pytest.mark.slow
def test_a_recipe_runs_and_its_rows_tell_the_parts_apart(smollm2, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MIXTURE.replace("TRAIN", write(tmp_path)))
    overrides = [f"model.tokenizer={smollm2}"]
    run = api.train(str(file), overrides=overrides, out=tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in (rows[0], rows[-1]):
        assert {"validation/reward/sums", "validation/reward/words"} <= row.keys()
    assert any("rollout/reward/sums" in row for row in rows)
    resolved = load_recipe(str(run / "recipe.toml"))
    assert resolved.task == load_recipe(str(file)).task
    lines = dict(make_plan(resolved, tmp_path))["task"]
    assert ("stops at", "'</answer>'") in lines


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.weights.sums=0"], "task.weights.sums must be greater than 0, got 0"),
        (["task.weights.other=1"], "got tasks sums, words, weights sums, words, other"),
        (["task.scales.other=2"], "task has scales for other, which are no tasks; remove them"),
        (["task.scales.sums=0"], "task.scales.sums must be greater than 0, got 0"),
        (
            ["task.scales.sums=2"],
            'task.scales.sums has no effect with objective.advantage.name = "group_zscore"',
        ),
        (["task.scales.sums=2", "objective.advantage=maxrl"], "has no effect with objective.adv"),
        (
            [
                "task.scales.sums=2",
                "objective.advantage=max_at_k",
                "objective.advantage.k=2",
                "objective.advantage.eps=1e-6",
            ],
            "task.scales.sums has no effect with objective.advantage.name",
        ),
        (
            ["task.scales.sums=2", "objective.advantage=teacher", "teacher.model=smollm2-135m"],
            "task.scales.sums has no effect with objective.advantage.name",
        ),
        (["task.tasks.sums.name=sort"], "task.tasks.sums.name must be keywords or files or math"),
        (["task.tasks.sums.name=mth"], "got 'mth'; did you mean 'math'?"),
        (["task.tasks.sums.prompt=r1zero"], "task.tasks.sums.prompt must match"),
        (["task.tasks.sums.workers=0"], "task.tasks.sums.workers must be greater"),
    ],
)
def test_settings_that_are_wrong(overrides, message, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MIXTURE)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(file), overrides)
    assert message in str(caught.value)
    for advantage in ("group_mean", {"name": "max_at_k", "k": 2}):
        kept = ["task.scales.sums=2", {"objective": {"advantage": advantage}}]
        assert load_recipe(str(file), kept).task.scales == {"sums": 2.0}
