import dataclasses
import json
import sys
from pathlib import Path

import pytest

from burnish import api
from burnish.errors import ConfigError, DataError
from burnish.launch.settings import rollout_settings
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.recipe.tasks import MathTask
from burnish.tasks.math import beginnings, check_row, load_math_rows, make_math
from burnish.tasks.rows import check_trainable
from burnish.types import Finish, Status
from tests.conftest import byte_tokenizer, make_group

R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\nUser: How many?\nAssistant: <think>"
)


def row(i, **more):
    return {"question": f"Ann has {i} pens and buys 2. How many?", "answer": f"#### {i + 2}"} | more


def write(tmp_path, rows, name="train.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("given", "golds"),
    [
        ({"question": "q", "answer": "6 * 200 = <<6*200=1200>>1,200\n#### 1,200"}, ["1200"]),
        ({"question": "q", "answer": "#### -3.5"}, ["-3.5"]),
        ({"problem": "q", "solution": r"\boxed{1} \boxed{\frac12}", "level": 5}, [r"\frac12"]),
        ({"problem": "q", "solution": r"\boxed{9}", "answer": "x+1"}, ["x+1"]),
        ({"problem": "q", "expected_answer": r"\boxed{7}", "answer": "8"}, ["7"]),
        ({"problem": "q", "answer": 7}, ["7"]),
        ({"problem": "q", "answer": [7, "seven"]}, ["7", "seven"]),
        ({"question": "What percent is it?", "answer": "#### 50"}, ["50", "50%"]),
        ({"problem": "As a percentage?", "solution": r"\boxed{50\%}"}, [r"50\%", "50", "50%"]),
        ({"question": "What is her new win percentage?", "answer": "#### 1,2"}, ["12", "12%"]),
        ({"question": "It costs $9 less 10%. How much?", "answer": "#### 50"}, ["50"]),
        ({"question": "They grow 5 percent. What is the sum?", "answer": "#### 5"}, ["5"]),
        ({"problem": "What percent?", "answer": "x"}, ["x"]),
    ],
)  # fmt: skip
def test_layouts_and_gold_answers(given, golds):
    found = check_row(given, "here")
    assert found["answer"] == golds
    assert found["question"] == given.get("question", given.get("problem"))
    assert found["solution"] == given.get("solution", given.get("answer"))


def test_rows_without_a_question_or_an_answer(tmp_path):
    cases = [
        ({"answer": "#### 1"}, r"train.jsonl, line 2: no text 'question' or 'problem', only 'answ"),
        ([1], "no text 'question' or 'problem', only none"),
        (row(4, answer="#### ???"), r"line 2: the row needs an answer .* got '\?\?\?'; correct"),
        (row(5, answer=r"#### \frac{1}{"), "answer that can be parsed"),
        (row(5, answer="####"), "answer that can be parsed, got 'none'"),
        ({"problem": "p", "solution": "nothing boxed"}, "answer that can be parsed, got 'none'"),
        ({"problem": "p"}, "answer that can be parsed, got 'none'"),
    ]
    for bad, message in cases:
        with pytest.raises(DataError, match=message):
            load_math_rows(MathTask(train=write(tmp_path, [row(1), bad])), seed=0)


def test_split_by_seed_or_by_file(tmp_path):
    train = write(tmp_path, [row(i) for i in range(20)])
    test = write(tmp_path, [row(i) for i in range(30, 40)], "test.jsonl")
    first, held_out = load_math_rows(MathTask(train=train, validation_rows=5), seed=1)
    assert (len(first), len(held_out)) == (15, 5)
    assert load_math_rows(MathTask(train=train, validation_rows=5), seed=1) == (first, held_out)
    assert load_math_rows(MathTask(train=train, validation_rows=5), seed=2)[1] != held_out
    assert [len(part) for part in load_math_rows(MathTask(train=train), seed=0)] == [18, 2]
    both = load_math_rows(MathTask(train=train, validation=test), seed=0)
    assert [len(part) for part in both] == [20, 10]
    some = MathTask(train=train, validation=test, validation_rows=4)
    assert len(load_math_rows(some, seed=0)[1]) == 4
    assert load_math_rows(some, seed=0)[1] == load_math_rows(some, seed=9)[1]  # runs compare
    for more in ({"validation_rows": 20}, {"validation": test, "validation_rows": 11}):
        with pytest.raises(
            DataError, match=r"(20 rows do not split: 20|10 rows do not split: 11) for validation"
        ):
            load_math_rows(MathTask(train=train, **more), seed=0)


def test_questions_that_are_held_out_are_not_trained_on(tmp_path):
    train = write(tmp_path, [row(i) for i in range(5)])
    again = [row(9), row(3, question="ANN has 3  pens and buys 2.\nHow many?"), row(4)]
    test = write(tmp_path, again, "test.jsonl")
    kept, held_out = load_math_rows(MathTask(train=train, validation=test), seed=0)
    assert (len(kept), len(held_out)) == (3, 3)
    none, all_rows = load_math_rows(MathTask(train=train, validation=train), seed=0)
    assert (len(none), len(all_rows)) == (0, 5)  # they can be evaluated
    with pytest.raises(DataError, match=r"no row of .* is left to train on, because every prompt"):
        check_trainable(none, all_rows)


def test_prompts(tmp_path):
    train = write(tmp_path, [row(i, question="How many?" + " " * i) for i in range(3)])
    write(tmp_path, [row(9)], "test.jsonl")
    made = {"tokenizer": byte_tokenizer(), "seed": 0}
    files = {"train": train, "validation": train.replace("train", "test")}
    (one, *_), (other, *_), (own, *_) = (
        [task.prompt(i) for i in range(3)]
        for task in (
            make_math(MathTask(**files), **made),
            make_math(MathTask(**files, prompt="question_only", chat=True), **made),
            make_math(MathTask(**files, prompt="{x} Q: {question}\nA:", answer="hash"), **made),
        )
    )
    assert one.text.replace("?  ", "?").replace("? ", "?") == R1_ZERO
    assert other.text.replace(" ", "") == "<user>Howmany?<assistant>2026"
    assert own.text.startswith("{x} Q: How many?")
    assert one.task == "math"
    assert one.prompt_id.startswith("math/train/")


WORKED = "Ann had 4 * 3 = <<4*3=12>>12.\nShe has 12-5=<<12-5=7>>7 now.\n#### 7"


def test_a_worked_answer_breaks_off_before_it_says_its_result():
    assert beginnings(WORKED) == [
        "Ann had 4 * 3 =",
        "Ann had 4 * 3 = 12.\n",
        "Ann had 4 * 3 = 12.\nShe has 12-5=",
    ]
    assert beginnings(r"It is $2 + 1 = 3$, so $x = \boxed{3}$.") == [
        "It is $2 + 1 =",
        "It is $2 + 1 = 3$, so $x =",
    ]
    for none in ("#### 7", r"\boxed{7}", "2 + 5 = 7", "7", 7, None, ["7"]):
        assert beginnings(none) == []


@pytest.mark.parametrize("chat", [False, True])
def test_hints_go_on_with_the_beginning_of_the_worked_answer(tmp_path, chat):
    rows = [row(i, answer=WORKED) for i in range(40)] + [row(90)]
    files = {"train": write(tmp_path, rows), "validation": write(tmp_path, [row(99)], "v")}
    asked = {"prompt": "Q: {question}\nA:", "answer": "hash", "chat": chat, **files}
    tokenizer = byte_tokenizer()
    made = {"tokenizer": tokenizer, "seed": 3}
    plain = make_math(MathTask(**asked), **made)
    task = make_math(MathTask(**asked, hints=0.5), **made)
    again = make_math(MathTask(**asked, hints=0.5), **made)
    gap, seen = "" if plain.prompt(0).text[-1:].isspace() else " ", []
    for i in range(82):
        whole, found = plain.prompt(i), task.prompt(i)
        assert whole.part is None
        assert found.text == again.prompt(i).text
        assert found.reference == whole.reference
        if found.part == "whole":
            assert (found.text, found.prompt_id) == (whole.text, whole.prompt_id)
            continue
        given = found.text.removeprefix(whole.text + gap)
        assert found.prompt_id == f"{whole.prompt_id}/{beginnings(WORKED).index(given)}"
        assert found.question == whole.question + gap + given
        assert tokenizer.decode(found.token_ids) == tokenizer.decode(whole.token_ids) + gap + given
        seen.append(given)
    assert 25 < len(seen) < 55
    assert set(seen) == set(beginnings(WORKED))
    assert [p.text for p in task.validation] == [p.text for p in plain.validation]
    always = make_math(MathTask(**asked, hints=1), **made)
    parts = [always.prompt(i).part for i in range(41)]
    assert parts.count("whole") == 1  # the row that has nothing but its result


def test_hints_need_worked_answers(tmp_path):
    train = write(tmp_path, [row(i) for i in range(3)])
    with pytest.raises(DataError, match=r"task.hints = 0.2 needs worked .* leave it at 0"):
        make_math(MathTask(train=train, hints=0.2), tokenizer=byte_tokenizer(), seed=0)


def test_grades(tmp_path):
    files = {
        "train": write(tmp_path, [row(1), row(2)]),
        "validation": write(tmp_path, [row(3, question="What percent?", answer="#### 1,050")], "v"),
    }
    (base,) = make_group(0, [1], [[1]], [0]).completions
    texts = {
        "r1_zero": "so </think> <answer>{}</answer>",
        "question_only": r"so \boxed{{{}}}",
    }
    for prompt, text in texts.items():
        task = make_math(MathTask(**files, prompt=prompt), tokenizer=byte_tokenizer(), seed=0)
        (asked,) = task.validation

        def grade(said, finish=Finish.STOP, task=task, asked=asked):
            response = dataclasses.replace(base, text=said, finish=finish)
            return task.grade_all([(asked, response)])[0]

        for right in ("1050", "1,050", "1050%"):
            assert grade(text.format(right)).parts == {"format": 1, "answer": 1, "ended": 1}
        assert grade(text.format("105")).reward == 0
        assert grade("1050").status is Status.UNPARSED
        assert task.answer(asked, text.format("7")) == "7"
        assert task.answer(asked, "7") is None
        task.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.prompt=r1zero"], "task.prompt must match pattern '^r1_zero$|^question_only$|"),
        (["task.answer=box"], "task.answer must be 'r1_zero', 'boxed'"),
        (["task.validation_rows=-1"], "task.validation_rows must be greater than or equal to 0"),
        (["task.name=maths"], "got 'maths'; did you mean 'math'?"),
        (["task.promt=r1_zero"], "unknown setting 'task.promt'; did you mean 'task.prompt'?"),
    ],
)
def test_settings_that_are_wrong(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe("math", overrides)
    assert message in str(caught.value)


def test_the_recipe_has_the_customary_settings(tmp_path):
    recipe = load_recipe("math")
    sections = {name: dict(lines) for name, lines in make_plan(recipe, tmp_path)}
    assert "256 responses = 32 prompts × 8 samples, temp" in sections["batches"]["rollout"]
    assert (
        "1 per rollout = 1 train batch of 256 responses × 1 epoch"
        in (sections["batches"]["gradient steps"])
    )
    assert (
        "200 steps: 51,200 responses sampled, 200 gradient steps (AdamW, learning rate 1e-05, "
        in (sections["batches"]["in all"])
    )
    assert sections["objective"]["objective"] == "L_t = −A_t log π"
    assert sections["objective"]["advantage"] == "A_i = (r_i − mean_g(r)) / (std_g(r) + 1e-06)"
    assert "validation_rows = 1024" in sections["task"]["task"]
    assert sections["task"]["stops at"] == "'</answer>'"
    params = rollout_settings(recipe).params
    assert (params.min_tokens, params.max_tokens, params.temperature) == (4, 1024, 1.0)
    assert params.stop == ("</answer>",)
    assert (recipe.train.betas, recipe.validation.every) == ((0.9, 0.95), 10)
    boxed = load_recipe("math", ["task.prompt=question_only", 'rollout.stop=["\\n\\n"]'])
    assert rollout_settings(boxed).params.stop == ("\n\n",)


@pytest.mark.slow
def test_the_recipe_runs_on_a_tiny_model_of_its_family(tmp_path):
    """Qwen2 with random weights and bytes for tokens."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
    import families

    sizes = {"vocab_size": 256, "max_position_embeddings": 1024}
    model = families.save(families.make("qwen2.5", **sizes), tmp_path / "tiny")
    byte_tokenizer().backend.save(str(model / "tokenizer.json"))
    files = {
        "train": write(tmp_path, [row(i) for i in range(8)]),
        "validation": write(tmp_path, [row(i) for i in range(20, 23)], "test.jsonl"),
    }
    overrides = [f"task.{key}={json.dumps(path)}" for key, path in files.items()]
    overrides += [
        "task.validation_rows=2",
        "task.workers=1",
        f"model.name={model}",
        "train.steps=2",
    ]
    overrides += ["rollout.batch=8", "rollout.group_size=4", "rollout.max_tokens=6"]
    overrides += ["train.batch=8", "engine.kv_mb=64", "engine.precision=fp32"]
    run = api.train("math", overrides=overrides, out=tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert rows[0]["validation/responses"] == 2
    assert rows[-1]["rollout/grades_unparsed"] == 1.0  # bytes at random say no answer
    assert {"rollout/part_format", "rollout/part_answer", "train/loss"} <= rows[-1].keys()
    again = load_recipe(str(run / "recipe.toml"))
    assert again.task.validation_rows == 2
