import json

import numpy as np
import pytest

from burnish.errors import ConfigError, DataError, GraderError
from burnish.graders.pool import InProcess
from burnish.rollout.rollout import check_errors, grade
from burnish.schema.tasks import FilesTask
from burnish.tasks.rows import DataRow, read_rows, rows_of, split
from burnish.tasks.text import ask_rows, make_files
from burnish.types import Status
from tests.conftest import byte_tokenizer, make_group


def make(rows, validation=(), **more):
    grader = InProcess(lambda text, row: {"reward": len(text), "n": row["n"]})
    given = (rows, list(validation))
    return ask_rows(FilesTask(**more), given, grader, tokenizer=byte_tokenizer(), seed=5)


ROWS = [DataRow({"prompt": f"question {i}", "n": i}, f"row {i}") for i in range(7)]


def write(tmp_path, *lines, name="data.jsonl"):
    file = tmp_path / name
    file.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return file


def test_rows_come_back_as_they_are(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]
    rows = [{"prompt": "a", "x": [1, {"y": None}]}, {"prompt": messages}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert read_rows(write(tmp_path, text)) == rows
    assert read_rows(write(tmp_path, b"\xef\xbb\xbf", text.replace("\n", "\r\n"), "\n")) == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2: not JSON: Expecting value"),
        ('{"prompt": "a"', "line 2: not JSON"),
        (b'{"prompt": "\xff"}', "line 2: not JSON: 'utf-8'"),
        ('["prompt"]', "line 2: must be an object with a prompt, got list"),
        ('{"question": "a", "answer": 1}', "line 2: no field 'prompt', only 'question', 'answer'"),
        ("{}", "line 2: no field 'prompt', only none"),
        ('{"prompt": ""}', "line 2: prompt must be a text that is not empty"),
        ('{"prompt": 3}', "line 2: prompt must be .* got '3'"),
        ('{"prompt": []}', "line 2: prompt must be"),
        ('{"prompt": [{"role": "user"}]}', "line 2: prompt must be .* messages"),
        (
            '{"prompt": [{"role": "usr", "content": "a"}]}',
            "line 2: a role must be one of system, user, .* got 'usr'; did you mean 'user'?",
        ),
        (
            r'{"prompt": "ab\ud83d"}',
            r"line 2: a text must be whole characters, got the lone surrogate '.ud83d' after 'ab'",
        ),
        (r'{"prompt": [{"role": "user", "content": "\udc00"}]}', "line 2: a text must be whole"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, line, message):
    file = write(tmp_path, '{"prompt": "fine"}\n', line, '\n{"prompt": "fine"}\n')
    with pytest.raises(DataError, match=f"data.jsonl, {message}"):
        read_rows(file)


def test_a_page_shows_what_was_asked_without_the_template():
    alone, after = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    rows = [{"prompt": p, "n": 0} for p in ("plain", [alone], [alone, after, alone])]
    shown = [prompt.asked for prompt in make([], rows).validation]
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


def test_files_that_are_not_there_or_empty(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl can't be read: No such file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"data\.jsonl holds no rows"):
        read_rows(write(tmp_path))


def test_rows_of_a_script():
    given = FilesTask(rows=[{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(DataError, match=r"prompts\[1\]: no field 'prompt'"):
        rows_of(given, seed=0)
    with pytest.raises(DataError, match="0 rows do not split"):
        rows_of(FilesTask(rows=[]), seed=0)


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


def test_split_by_seed():
    train, validation = split(ROWS, 2, seed=1)
    assert len(validation) == 2
    assert sorted([*train, *validation], key=lambda row: row["n"]) == ROWS
    assert split(ROWS, 2, seed=1) == (train, validation)
    assert split(ROWS, 2, seed=3) != (train, validation)
    with pytest.raises(DataError, match="1 rows do not split"):
        split(ROWS[:1], 1, seed=1)


def test_the_files_of_a_recipe(tmp_path):
    train = write(tmp_path, *(json.dumps(row) + "\n" for row in ROWS))
    other = write(tmp_path, '{"prompt": "other"}', name="other.jsonl")
    both = rows_of(FilesTask(train=str(train), validation=str(other)), seed=0)
    assert both == (ROWS, [{"prompt": "other"}])
    assert [len(part) for part in rows_of(FilesTask(train=str(train)), seed=0)] == [6, 1]
    with pytest.raises(ConfigError, match="there are no prompts; give --data"):
        rows_of(FilesTask(), seed=0)


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
