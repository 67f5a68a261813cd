import numpy as np
import pytest

from burnish.errors import ConfigError, GraderError, ModelError
from burnish.graders.pool import InProcess
from burnish.recipe.tasks import FilesTask
from burnish.rollout.rollout import check_errors, grade
from burnish.tasks.rows import DataRow
from burnish.tasks.text import encode_prompt, make_files, make_rows_task
from burnish.types import Status
from tests.conftest import byte_tokenizer, make_group


def make(rows, validation=(), **more):
    grader = InProcess(lambda text, row: {"reward": len(text), "n": row["n"]})
    given = (rows, list(validation))
    return make_rows_task(FilesTask(**more), given, grader, tokenizer=byte_tokenizer(), seed=5)


ROWS = [DataRow({"prompt": f"question {i}", "n": i}, f"row {i}") for i in range(7)]


def test_a_page_shows_what_was_asked_without_the_template():
    alone, after = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    rows = [{"prompt": p, "n": 0} for p in ("plain", [alone], [alone, after, alone])]
    shown = [prompt.question for prompt in make([], rows).validation]
    assert shown == ["plain", "hi", "user: hi\n\nassistant: ho\n\nuser: hi"]


def test_a_reward_that_never_returns_is_an_error_that_halts_and_names_response_and_row(tmp_path):
    (tmp_path / "mine.py").write_text("def f(response, row):\n    while True: pass\n")
    config = FilesTask(
        reward=f"{tmp_path}/mine.py:f", workers=1, cpu_seconds=0.1, wall_seconds=5, rows=ROWS
    )
    task = make_files(config, tokenizer=byte_tokenizer(), seed=0)
    completions = make_group(0, [1], [[12], [34]], [0, 0]).completions
    prompt = task.prompt(0)
    groups = grade(task, [(0, prompt)], [completions])
    task.close()
    assert [g.status for g in groups[0].grades] == [Status.ERROR] * 2
    with pytest.raises(GraderError) as caught:
        check_errors(groups, limit=0.5)
    n = prompt.reference["n"]
    assert (
        f"response 0 to {prompt.prompt_id} ('12', row {{'n': {n}, 'prompt': 'question {n}'}}): "
        "took more than 0.1 s of CPU time (task.cpu_seconds)"
    ) in str(caught.value)


def test_every_epoch_sees_every_row_once_in_an_order_of_its_own():
    task = make(ROWS)
    stream = [task.prompt(i) for i in range(21)]
    orders = [[p.reference["n"] for p in stream[e * 7 : e * 7 + 7]] for e in range(3)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    again = make(ROWS)
    for i in (20, 3, 9, 3):  # in any order: the prompt is a function of its index
        assert again.prompt(i).prompt_id == stream[i].prompt_id
        assert np.array_equal(again.prompt(i).token_ids, stream[i].token_ids)
    assert stream[0].prompt_id == f"files/train/{orders[0][0]}"
    assert stream[0].text == f"<user>question {orders[0][0]}<assistant>2026"


def test_a_recipe_and_a_script_make_the_task(tmp_path):
    (tmp_path / "mine.py").write_text("def f(response, row): return row['n'] + len(response)\n")
    config = FilesTask(reward=f"{tmp_path}/mine.py:f", workers=1, rows=ROWS)
    tokenizer = byte_tokenizer()
    (short, long) = make_group(0, [1], [[123], [1234]], [0, 0]).completions
    task = make_files(config, tokenizer=tokenizer, seed=0)
    assert len({task.prompt(i).prompt_id for i in range(5)}) == 5
    assert len(task.validation) == 1
    prompt = task.prompt(0)
    grades = task.grade_all([(prompt, short), (prompt, long)])
    task.close()
    assert [grade.reward for grade in grades] == [prompt.reference["n"] + n for n in (3, 4)]
    given = config.model_copy(update={"function": lambda r, row: 9})
    own = make_files(given, tokenizer=tokenizer, seed=0)
    assert own.grade_all([(prompt, short)])[0].reward == 9
    with pytest.raises(ConfigError, match="there is no reward; give --reward"):
        make_files(FilesTask(rows=ROWS), tokenizer=tokenizer, seed=0)


def test_grades_see_the_row_and_the_end():
    task = make(ROWS, ROWS[:2], must_end=True)
    prompt = task.validation[1]
    assert (prompt.prompt_id, prompt.task, prompt.reference) == (
        "files/validation/1",
        "files",
        ROWS[1],
    )
    (completion,) = make_group(0, [1], [[123]], [0]).completions
    (graded,) = task.grade_all([(prompt, completion)])
    assert (graded.reward, graded.parts) == (3.0, {"n": 1.0, "ended": 1.0})
    assert task.answer(prompt, " the whole text\n") == "the whole text"
    task.close()


def test_text_messages_and_raw_prompts():
    tokenizer = byte_tokenizer()
    text, ids = encode_prompt(tokenizer, "hi", chat=True)
    assert text == "<user>hi<assistant>2026"  # the date is a constant: a resumed run reads the same
    assert tokenizer.decode(ids) == text
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    for chat in (True, False):
        text, _ = encode_prompt(tokenizer, messages, chat=chat)
        assert text == "<system>s<user>hi<assistant>2026"
    assert encode_prompt(tokenizer, "hi", chat=False)[0] == "hi"
    plain = byte_tokenizer(None)
    assert encode_prompt(plain, "hi", chat=False)[0] == "hi"
    with pytest.raises(ModelError, match="no chat template"):
        encode_prompt(plain, "hi", chat=True)
