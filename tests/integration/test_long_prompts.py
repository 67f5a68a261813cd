"""Prompts that are too long: rows are refused with their place, others are skipped or cut."""

import json
from functools import partial

import pytest

from burnish.errors import ConfigError, DataError
from burnish.recipe.costs import Room, Size, prompt_room
from burnish.recipe.load import load_recipe, with_precision
from burnish.recipe.plan import make_plan
from burnish.recipe.tasks import FilesTask, GymTask, KeywordsTask, MathTask
from burnish.tasks.gym import make_gym
from burnish.tasks.keywords import make_keywords
from burnish.tasks.math import make_math
from burnish.tasks.stream import PromptStream, fits
from burnish.tasks.text import make_files
from tests.conftest import byte_tokenizer

SIZE = Size(1_000_000, cached=100, context=200, longest_prompt=30)
MADE = {"tokenizer": byte_tokenizer(), "seed": 0}


def bound(*overrides, size=SIZE):
    recipe = load_recipe("keywords", ["train.log_kl=false", "validation.max_tokens=90", *overrides])
    recipe = with_precision(recipe, "fp32")
    micro_tokens = recipe.train.micro_tokens
    return prompt_room(size, recipe.engine, recipe.rollout, recipe.validation, micro_tokens)


def test_the_room_is_what_the_tightest_bound_leaves():
    assert bound() == (199, "the model's context of 200 tokens")
    micro = ["train.micro_tokens=100", "rollout.max_tokens=64"]
    assert bound(*micro) == (10, "train.micro_tokens = 100 beside max_tokens = 90")
    assert bound(*micro, size=SIZE._replace(context=100))[0] == 99  # no sequence is longer
    wide = SIZE._replace(cached=2**20 // 4 // 160)  # 160 tokens and a little in a megabyte
    assert bound("engine.kv_mb=1", size=wide) == (
        71, "engine.kv_mb = 1 beside max_tokens = 90"
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"micro_tokens = 64 .*max_tokens = 90 leaves no room"):
        bound("train.micro_tokens=64")
    with pytest.raises(ConfigError, match=r"engine\.kv_mb = 1 .* leaves no room .*; use more"):
        bound("engine.kv_mb=1", size=SIZE._replace(cached=2**20 // 4 // 48))


def gym(**more):
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    settings = {"min_terms": 2, "max_terms": 6}
    given = GymTask(generator="chain_sum", settings=settings, validation_prompts=20, **more)
    return partial(make_gym, given, **MADE)


def keywords(**more):
    return partial(make_keywords, KeywordsTask(validation_prompts=20, **more), **MADE)


@pytest.mark.parametrize("make", [gym, keywords])
def test_an_endless_task_asks_only_what_there_is_room_for(make):
    free = make()()
    lengths = sorted(len(free.prompt(i).token_ids) for i in range(60))
    tight = Room(lengths[30], "here")
    stream = PromptStream(make()(room=tight), tight)
    asked = stream.take(60)
    assert [index for index, _ in asked] == list(range(60))
    assert max(len(prompt.token_ids) for _, prompt in asked) <= tight.tokens
    assert stream.skipped >= 29
    short = [p for p in map(free.prompt, range(60)) if fits(p, tight)]
    assert [p.text for _, p in asked[: len(short)]] == [p.text for p in short]
    assert 0 < sum(fits(prompt, tight) for prompt in free.validation) < 20
    cut = make(long_prompts="cut")(room=tight)
    for i in range(20):
        whole, prompt = free.prompt(i), cut.prompt(i)
        assert prompt.token_ids.tolist() == whole.token_ids[-tight.tokens :].tolist()
        assert prompt.text == MADE["tokenizer"].decode(prompt.token_ids)
        assert prompt.reference == whole.reference
    with pytest.raises(DataError, match="100 consecutive prompts are too long"):
        PromptStream(free, Room(9, "here")).take(1)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_row_that_is_too_long_is_refused_with_its_file_and_line(tmp_path):
    """Whichever side of the split it falls on."""
    rows = [{"prompt": "short", "n": i} for i in range(20)]
    rows[13] = rows[17] = {"prompt": "long " * 40}
    given = {"function": lambda response, row: 0.0, "chat": False}
    task = FilesTask(train=write(tmp_path / "rows.jsonl", rows), **given)
    said = r"rows\.jsonl, line 14: the prompt has 200 tokens, and here leaves 199; shorten"
    with pytest.raises(DataError, match=said):
        make_files(task, **MADE, room=Room(199, "here"))
    assert make_files(task, **MADE, room=Room(200, "here")).prompt(0)
    both = [{"prompt": "b" * 99}, {"prompt": "a"}]
    with pytest.raises(DataError, match=r"prompts\[0\]: the prompt has 99 tokens"):
        make_files(FilesTask(rows=both, **given), **MADE, room=Room(9, "here"))


def test_a_math_row_is_long_with_its_longest_hint(tmp_path):
    worked = "2 + 2 = 4\n4 + 4 = 8\n#### 8"
    rows = [{"question": f"What is {i}?", "answer": "#### 1"} for i in range(20)]
    rows[6] = {"question": "What is 2 + 2 + 4?", "answer": worked}
    asked = {"train": write(tmp_path / "rows.jsonl", rows), "prompt": "question_only"}
    bare = Room(len("What is 2 + 2 + 4?"), "here")
    make_math(MathTask(**asked), **MADE, room=bare).close()
    with pytest.raises(DataError, match=r"rows\.jsonl, line 7: the prompt has \d+ tokens"):
        make_math(MathTask(**asked, hints=1.0), **MADE, room=bare)
    task = make_math(MathTask(**asked, hints=1.0), **MADE)
    longest = max(len(task.prompt(i).token_ids) for i in range(400))
    task.close()
    make_math(MathTask(**asked, hints=1.0), **MADE, room=bare._replace(tokens=longest)).close()


def test_a_plan_says_how_many_are_too_long(tmp_path):
    recipe = with_precision(load_recipe("keywords"), "fp32")
    some = SIZE._replace(too_long=3)
    lines = dict(dict(make_plan(recipe, tmp_path, some))["task"])
    assert lines["too long"] == (
        "3 prompts have more than 199 tokens (the model's context of 200 tokens); they are skipped"
    )
    assert "too long" not in dict(dict(make_plan(recipe, tmp_path, SIZE))["task"])
