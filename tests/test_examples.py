"""Scripts in examples/: one step by hand, and scripts that write rows for recipes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import burnish
from burnish import config
from burnish.model import hub
from burnish.tasks.pairs import check_preference
from burnish.tasks.rows import read_rows

EXAMPLES = Path(burnish.__file__).parents[1] / "examples"


def script(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


@pytest.fixture
def tokenizer(smollm2, monkeypatch):
    monkeypatch.setattr(hub, "resolve", lambda name: smollm2)


SCRATCH = {"name": "scratch", "layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}


@pytest.mark.parametrize("name", ["sort", "keywords"])
def test_a_step_by_hand_is_the_first_step_of_a_run(name, tmp_path, smollm2):
    changes = [{"train": {"steps": 1, "epochs": 1}}]
    if name == "keywords":
        sizes = {"model": SCRATCH | {"tokenizer": smollm2}, "task.validation_prompts": 1}
        sizes |= {"rollout": {"batch": 8, "max_tokens": 4}, "train.batch": 8, "device": "cpu"}
        changes.append(sizes)
    recipe = config.load(name, changes)
    groups, (taken,) = script("pieces").step(recipe)
    run = burnish.train(recipe, out=tmp_path / "run", show=False)
    assert taken.items() <= run.metrics[-1].items()
    rewards = [reward for group in groups for reward in group.rewards]
    assert sum(rewards) / len(rewards) == pytest.approx(run.metrics[-1]["rollout/reward"])


def answering(good):
    """Answers two samples to a prompt; ``good(i)``: the second answer to prompt i is right."""

    def generate(prompts, *, n, **how):
        answers = []
        for i, prompt in enumerate(prompts):
            words = prompt.partition("words: ")[2].rstrip(".").split(", ")
            right = f" Here are {' and '.join(words)}. \n"
            texts = ("nothing", right if good(i) else "neither")
            answers += [SimpleNamespace(prompt=prompt, text=t, finish="stop") for t in texts]
        return answers

    return generate


def test_only_answers_with_the_words_are_kept(tmp_path, monkeypatch, tokenizer):
    write_keywords = script("write_keywords")
    monkeypatch.setattr(burnish, "generate", answering(lambda i: i % 3 == 0), raising=False)
    run(write_keywords, monkeypatch, tmp_path / "new", "--rows", 80, "--samples", 2)
    train, validation = (
        read_rows(tmp_path / "new" / f"{name}.jsonl") for name in ("train", "validation")
    )
    assert (len(train), len(validation)) == (64, 16)
    for row in [*train, *validation]:
        assert row["answer"] == f"Here are {' and '.join(row['keywords'])}."
        assert row["prompt"].endswith(f"words: {', '.join(row['keywords'])}.")
    seen = [{w for row in rows for w in row["keywords"]} for rows in (train, validation)]
    assert not seen[0] & seen[1]


def test_a_model_that_never_has_the_words_is_given_up(tmp_path, monkeypatch, tokenizer):
    write_keywords = script("write_keywords")
    monkeypatch.setattr(burnish, "generate", answering(lambda i: False), raising=False)
    with pytest.raises(SystemExit, match=r"only 0 of 4 rows after .* prompts"):
        run(write_keywords, monkeypatch, tmp_path / "new", "--rows", 5, "--samples", 2)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("sum_", "lines"),
    [
        ("4 - 1", ["4 - 1 = 3"]),
        ("5 - 9 + 2", ["5 - 9 = -4", "-4 + 2 = -2"]),
        ("55 + 98 - 30", ["55 + 90 = 145", "145 + 8 = 153", "153 - 30 = 123"]),
        ("4 + 0", ["4 + 0 = 4"]),
        ("14 - 29", ["29 - 10 = 19", "19 - 4 = 15", "14 - 29 = -15"]),
        ("3 - 9 + 17", ["3 - 9 = -6", "17 - 6 = 11", "-6 + 17 = 11"]),
        ("2 - 60 + 8", ["60 - 2 = 58", "2 - 60 = -58", "58 - 8 = 50", "-58 + 8 = -50"]),
        ("0 - 5 - 12", ["0 - 5 = -5", "-5 - 10 = -15", "-15 - 2 = -17"]),
    ],
)
def test_sums_are_worked_term_by_term(sum_, lines):
    worked = script("write_sums").worked
    assert worked(f"State the final answer to the problem: {sum_} =") == "\n".join(lines)


def test_no_sum_is_written_twice(tmp_path, monkeypatch, tokenizer):
    """More rows than the recipe has training prompts."""
    run(script("write_sums"), monkeypatch, tmp_path / "sums", "--rows", 1200)
    train, validation = (
        read_rows(tmp_path / "sums" / f"{name}.jsonl") for name in ("train", "validation")
    )
    assert (len(train), len(validation)) == (960, 240)
    assert len({row["prompt"] for row in [*train, *validation]}) == 1200
    for row in train:
        total = row["prompt"].rpartition(":")[2].strip().rstrip("= ")
        assert row["answer"].endswith(f" = {eval(total)}")


def test_the_first_wrong_line_is_found(tmp_path, monkeypatch, capsys):
    """5 + 3 - 2 is 8, then 6. The gains of the lines are 0.1 − 0.6 and 0 − 0.1."""
    text = "5 + 3 = 9\n9 - 2 = 7"
    row = {"asked": "5 + 3 - 2 =\n", "response": text, "tokens": [*text, "<end>"], "reward": 0.0}
    row["steps"] = [[0, 0.6], [10, 0.1]]
    right = row | {"response": "5 + 3 = 8\n8 - 2 = 6", "reward": 1.0}
    tied = row | {"steps": [[0, 0.0], [10, 0.0]]}
    lines = [json.dumps(one) + "\n" for one in (row, right, tied)]
    (tmp_path / "rollouts.jsonl").write_text("".join(lines))
    monkeypatch.syspath_prepend(EXAMPLES)
    run(script("first_wrong"), monkeypatch, tmp_path)
    told = capsys.readouterr().out
    assert "-0.50  5 + 3 = 9   <- first wrong line\n-0.10  9 - 2 = 7\n" in told
    assert "2 wrong responses of several lines, 1 with one lowest advantage" in told
    assert "first wrong line: 1 of 1" in told
    assert "a guess among the lines: 0.5 of 1" in told


def test_digits_are_written_with_pairs(tmp_path, monkeypatch):
    """200 questions, 40 of them held out; six pairs of each, a sixth of them held out."""
    run(script("write_digits"), monkeypatch, tmp_path / "digits")
    rows, pairs = tmp_path / "digits", tmp_path / "digits" / "pairs"
    assert len(read_rows(rows / "train.jsonl")) == 200
    assert len(read_rows(rows / "validation.jsonl")) == 40
    held_out = read_rows(pairs / "validation.jsonl", check_preference)
    learned = read_rows(pairs / "train.jsonl", check_preference)
    assert (len(learned), len(held_out)) == (1000, 200)
    for row in held_out:
        a, sign, b = row["prompt"].split()[:3]
        assert int(row["chosen"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_small_sums_have_their_running_totals(tmp_path, monkeypatch):
    """9² + 9³ + 9⁴ = 7,371 sums, each once; the last total is the answer."""
    run(script("write_sums"), monkeypatch, tmp_path / "sums", "--small")
    names = ("validation", "train", "questions")
    rows = [row for name in names for row in read_rows(tmp_path / "sums" / f"{name}.jsonl")]
    assert len({row["prompt"] for row in rows}) == len(rows) == 7371
    three = next(row for row in rows if row["prompt"] == "3+4+9=")
    assert (three["answer"], three["expected_answer"]) == ("07\n16", "16")


def test_sums_are_checked_never_once_or_twice(tmp_path, monkeypatch):
    run(script("write_checked"), monkeypatch, tmp_path / "sums")
    names = ("validation", "train", "questions")
    rows = [row for name in names for row in read_rows(tmp_path / "sums" / f"{name}.jsonl")]
    assert len({row["prompt"] for row in rows}) == 9**4
    for checks, row in zip([0, 1, 2], rows, strict=False):
        a, b, c, d = map(int, row["prompt"].rstrip("=").split("+"))
        worked = f"{a + b:02d} {a + b + c:02d} {a + b + c + d:02d}"
        assert row["answer"] == f"{','.join([worked] * (checks + 1))}={a + b + c + d:02d}"
        assert row["expected_answer"] == str(a + b + c + d)


def test_a_critic_learns_beside_a_policy(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["train.steps=2", "critic.warmup_rollouts=1", "rollout.batch=8", "train.batch=8"]
    run(script("critic"), monkeypatch, *small, "rollout.max_tokens=4", "device=cpu")
    assert capsys.readouterr().out.startswith("steps 1 to 2: reward ")
