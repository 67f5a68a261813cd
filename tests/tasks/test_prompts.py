"""Prompts that are too long: rows are refused with their place, others are skipped or cut."""

import json
from itertools import count

import numpy as np
import pytest

from burnish import config
from burnish.config import FilesTask, GymTask, KeywordsTask, MathTask
from burnish.errors import ConfigError, DataError, ModelError
from burnish.plan import Room, Size, plan, room
from burnish.tasks.files import make_files
from burnish.tasks.gym import Gym
from burnish.tasks.keywords import Keywords
from burnish.tasks.math import make_math
from burnish.tasks.mixture import Mixture
from burnish.tasks.prompts import Writer, encode
from burnish.types import Prompt
from tests.conftest import byte_tokenizer

SIZE = Size(1_000_000, cached=100, context=200, longest_prompt=30)
MADE = {"tokenizer": byte_tokenizer(), "seed": 0}


def bound(*overrides, size=SIZE):
    recipe = config.load("keywords", ["train.log_kl=false", "validation.max_tokens=90", *overrides])
    return room(config.with_precision(recipe, "fp32"), size)


def test_the_room_is_what_the_tightest_bound_leaves():
    assert bound() == (199, "the model's context of 200 tokens")
    micro = ["train.micro_tokens=100", "rollout.max_tokens=64"]
    assert bound(*micro) == (36, "train.micro_tokens = 100 beside rollout.max_tokens = 64")
    logged = [*micro, "train.log_kl=true"]
    assert bound(*logged) == (10, "train.micro_tokens = 100 beside validation.max_tokens = 90")
    assert bound(*micro, size=SIZE._replace(context=100))[0] == 99  # no sequence is longer
    wide = SIZE._replace(cached=2**20 // 4 // 160)  # 160 tokens and a little in a megabyte
    assert bound("engine.kv_mb=1", size=wide) == (
        71, "engine.kv_mb = 1 beside validation.max_tokens = 90"
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"micro_tokens = 64 .*max_tokens = 64 leaves no room"):
        bound("train.micro_tokens=64")
    with pytest.raises(ConfigError, match=r"engine\.kv_mb = 1 .* leaves no room .*; use more"):
        bound("engine.kv_mb=1", size=SIZE._replace(cached=2**20 // 4 // 48))


def prompts(*lengths):
    ids = [np.arange(length, dtype=np.int32) + 65 for length in lengths]
    return [Prompt(f"p{i}", "x" * len(row), row, "t") for i, row in enumerate(ids)]


def test_a_prompt_that_is_too_long_is_skipped_and_counted_or_cut():
    tokenizer = MADE["tokenizer"]

    def writer(room, long_prompts="skip"):
        return Writer("t", tokenizer, chat=False, room=room, long_prompts=long_prompts)

    five = Room(5, "so")
    skips, cuts = writer(five), writer(five, "cut")
    assert skips.first_fitting(prompts(9, 6, 5, 4)).prompt_id == "p2"
    assert skips.too_long == (2, 0)
    (first, *_) = given = prompts(5, 4)
    assert skips.first_fitting(given) is first
    cut = cuts.first_fitting(prompts(9, 4))
    assert cut.token_ids.tolist() == [69, 70, 71, 72, 73]
    assert cut.text == tokenizer.decode(cut.token_ids)
    assert cuts.too_long == (0, 1)
    assert writer(None).first_fitting(prompts(9)).prompt_id == "p0"
    assert skips.first_fitting([]) is None
    with pytest.raises(DataError, match=r"2 prompts one after .* has 7 tokens, and so leaves 5"):
        skips.first_fitting(prompts(8, 7))


def test_text_messages_and_raw_prompts():
    tokenizer = byte_tokenizer()
    text, ids = encode(tokenizer, "hi", chat=True)
    assert text == "<user>hi<assistant>2026"  # the date is a constant: a resumed run reads the same
    assert tokenizer.decode(ids) == text
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    for chat in (True, False):
        assert encode(tokenizer, messages, chat=chat)[0] == "<system>s<user>hi<assistant>2026"
    assert encode(tokenizer, "hi", chat=False)[0] == "hi"
    plain = byte_tokenizer(None)
    assert encode(plain, "hi", chat=False)[0] == "hi"
    with pytest.raises(ModelError, match="no chat template"):
        encode(plain, "hi", chat=True)


def make_gym(**more):
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    settings = {"min_terms": 2, "max_terms": 6}
    return {"config": GymTask(generator="chain_sum", settings=settings, **more), "kind": Gym}


def make_keywords(**more):
    return {"config": KeywordsTask(**more), "kind": Keywords}


@pytest.mark.parametrize("make", [make_gym, make_keywords])
def test_an_endless_task_asks_only_what_there_is_room_for(make):
    made = make(validation_prompts=20)
    kind, settings = made["kind"], made["config"]
    free = kind(settings, **MADE)
    lengths = sorted(len(free.prompt(i).token_ids) for i in range(60))
    tight = Room(lengths[30], "here")
    task = kind(settings, **MADE, room=tight)
    skipped_before = task.too_long.skipped
    asked = [task.prompt(i) for i in range(60)]
    assert max(len(prompt.token_ids) for prompt in asked) <= tight.tokens
    assert task.too_long.skipped - skipped_before >= 29
    for i, prompt in enumerate(asked):
        whole = free.prompt(i)
        if len(whole.token_ids) <= tight.tokens:
            assert prompt.text == whole.text
        assert task.prompt(i).text == prompt.text  # a function of the index
    assert len({prompt.prompt_id for prompt in task.validation}) == 20
    assert max(len(prompt.token_ids) for prompt in task.validation) <= tight.tokens
    cut = kind(make(validation_prompts=20, long_prompts="cut")["config"], **MADE, room=tight)
    for i, prompt in zip(range(60), map(cut.prompt, count()), strict=False):
        whole = free.prompt(i)
        assert prompt.token_ids.tolist() == whole.token_ids[-tight.tokens :].tolist()
        assert prompt.reference == whole.reference
    with pytest.raises(DataError, match="prompts one after another are too long"):
        kind(settings, **MADE, room=Room(9, "here")).prompt(0)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_row_that_is_too_long_is_refused_with_its_file_and_line(tmp_path):
    """Whichever side of the split it falls on."""
    rows = [{"prompt": "short", "n": i} for i in range(20)]
    rows[13] = rows[17] = {"prompt": "long " * 40}
    task = FilesTask(train=write(tmp_path / "rows.jsonl", rows), chat=False)
    given = {**MADE, "reward": lambda response, row: 0.0}
    said = r"rows\.jsonl, line 14: the prompt has 200 tokens, and here leaves 199 \(and 1 other"
    with pytest.raises(DataError, match=said):
        make_files(task, **given, room=Room(199, "here"))
    assert make_files(task, **given, room=Room(200, "here")).rows
    with pytest.raises(DataError, match=r"prompts\[0\]: the prompt has 99 tokens"):
        make_files(FilesTask(chat=False), **given, prompts=["b" * 99, "a"], room=Room(9, "here"))


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


def test_a_mixture_counts_what_its_parts_skip():
    free = Keywords(KeywordsTask(), **MADE)
    tight = Room(min(len(free.prompt(i).token_ids) for i in range(20)) + 5, "here")
    parts = {name: Keywords(KeywordsTask(), **MADE, room=tight) for name in "ab"}
    task = Mixture(parts, {"a": 1.0, "b": 1.0}, seed=0)
    for i in range(20):
        task.prompt(i)
    skipped = [part.too_long.skipped for part in parts.values()]
    assert task.too_long == (sum(skipped), 0)
    assert min(skipped) > 0


def test_a_plan_says_how_many_are_too_long(tmp_path):
    recipe = config.with_precision(config.load("keywords"), "fp32")
    some = SIZE._replace(looked_at=1003, too_long=3)
    lines = dict(dict(plan(recipe, tmp_path, some))["task"])
    assert lines["too long"] == (
        "3 of 1,003 prompts that were looked at have more than 199 tokens (the model's context of "
        "200 tokens); they are skipped or cut, as set"
    )
    assert "too long" not in dict(dict(plan(recipe, tmp_path, SIZE))["task"])
