"""Every task can be sent to another process: it asks and grades there as it does here."""

import dataclasses
import json
import pickle

import numpy as np
import pytest

from burnish.recipe.costs import Room
from burnish.recipe.tasks import FilesTask, GymTask, KeywordsTask, MathTask, PairsTask, SortTask
from burnish.tasks.gym import make_gym
from burnish.tasks.keywords import make_keywords
from burnish.tasks.math import make_math
from burnish.tasks.mixture import Mixture
from burnish.tasks.pairs import make_pairs
from burnish.tasks.sorting import Sorting
from burnish.tasks.text import make_files
from tests.conftest import byte_tokenizer, make_group

TOKENIZER = byte_tokenizer()
MADE = {"tokenizer": TOKENIZER, "seed": 3}


def files(tmp_path):
    (tmp_path / "mine.py").write_text("def f(response, row): return row['n'] + len(response)\n")
    prompts = [{"prompt": f"question {i}", "n": i} for i in range(9)]
    config = FilesTask(reward=f"{tmp_path}/mine.py:f", workers=1, rows=prompts)
    return make_files(config, **MADE, room=Room(100, "here"))


def math(tmp_path, **more):
    worked = "2 + {} = 2\n#### {}"
    rows = [{"question": f"2 + {i}?", "answer": worked.format(i, 2 + i)} for i in range(9)]
    train = tmp_path / "rows.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_math(MathTask(train=str(train), workers=1, hints=0.5, **more), **MADE)


def keywords(tmp_path):
    return make_keywords(KeywordsTask(validation_prompts=4), **MADE, room=Room(90, "here"))


def gym(tmp_path):
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    return make_gym(GymTask(generator="chain_sum", validation_prompts=4, workers=1), **MADE)


def mixture(tmp_path):
    parts = {"sums": math(tmp_path), "words": keywords(tmp_path)}
    return Mixture(parts, {"sums": 2.0, "words": 1.0}, seed=3)


def sorting(tmp_path):
    return Sorting(SortTask(), seed=3)


def told(prompts):
    fields = [dataclasses.asdict(prompt) for prompt in prompts]
    return [field | {"token_ids": field["token_ids"].tolist()} for field in fields]


@pytest.mark.parametrize("make", [files, math, keywords, gym, mixture, sorting])
def test_a_pickled_task_asks_and_grades_the_same(make, tmp_path):
    task = make(tmp_path)
    for grades_before in (False, True):  # workers may be running, and stay behind
        other = pickle.loads(pickle.dumps(task))
        asked = [task.prompt(i) for i in range(30)]
        assert told(other.prompt(i) for i in range(30)) == told(asked)
        assert told(other.validation) == told(task.validation)
        said = [(str(i), f"so </think> <answer>{i}</answer>") for i in (0, 2, 4)]
        (base,) = make_group(0, [1], [[0, 1, 2]], [0]).completions
        pairs = [
            (prompt, dataclasses.replace(base, text=text))
            for prompt in asked[:3]
            for texts in said
            for text in texts
        ]
        assert other.grade_all(pairs) == task.grade_all(pairs)
        assert [other.answer(p, c.text) for p, c in pairs] == [
            task.answer(p, c.text) for p, c in pairs
        ]
        other.close()
        assert grades_before or task.grade_all(pairs)  # the first keeps its own workers
    task.close()


def test_pickled_pairs_teach_the_same():
    tokenizer = byte_tokenizer()
    tokenizer.end_ids = (0,)
    rows = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(9)]
    task = make_pairs(PairsTask(rows=rows), tokenizer=tokenizer, seed=3, context=100)
    other = pickle.loads(pickle.dumps(task))
    for one, same in zip(task.batch(1, 3), other.batch(1, 3), strict=True):
        assert one.prompt.text == same.prompt.text
        assert np.array_equal(one.completions[0].token_ids, same.completions[0].token_ids)
