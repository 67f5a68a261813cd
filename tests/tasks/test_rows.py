import json

import pytest
from pydantic import ValidationError

from burnish.errors import ConfigError, DataError
from burnish.randomness import Purpose, Stream, permutation
from burnish.recipe.tasks import FilesTask, MathTask, PairsTask
from burnish.tasks.data.lines import ScriptRows
from burnish.tasks.rows import (
    DataRow,
    Rows,
    check_trainable,
    describe_split,
    load_rows,
    read_rows,
    split,
)

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


def test_files_that_are_not_there_or_empty(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl can't be read: No such file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"data\.jsonl holds no rows"):
        read_rows(write(tmp_path))


def test_rows_of_a_script():
    given = FilesTask(rows=[{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(DataError, match=r"prompts\[1\]: no field 'prompt'"):
        load_rows(given, seed=0)
    with pytest.raises(DataError, match="0 rows do not split"):
        load_rows(FilesTask(rows=[]), seed=0)


def hashes(*prompts):
    return Rows(ScriptRows([{"prompt": prompt} for prompt in prompts])).hash_prompts()


def test_split_by_seed():
    prompts = hashes(*(row["prompt"] for row in ROWS))
    train, validation = (part.tolist() for part in split(prompts, 2, seed=1))
    # Without repeated prompts, the first rows of a random order are held out.
    order = permutation(1, Stream.TASK, 0, Purpose.SPLIT, 7)
    assert validation == sorted(order[:2])
    assert train == sorted(order[2:])
    assert split(prompts, 2, seed=3)[1].tolist() != validation
    with pytest.raises(DataError, match="1 rows do not split: 1 for validation leave no others"):
        split(prompts[:1], 1, seed=1)


def test_a_held_out_prompt_is_in_no_training_row():
    given = ["a", "b", " A ", "c", "b", "B\n", "d", "a b", "a  b", "e"] * 3
    plain = [" ".join(prompt.casefold().split()) for prompt in given]
    for seed in range(20):
        for count in (None, 1, 3, 5):
            train, held_out = split(hashes(*given), count, seed=seed)
            learned, asked = {plain[i] for i in train}, [plain[i] for i in held_out]
            assert len(set(asked)) == len(asked) == (count or 1)
            assert learned == set(plain) - set(asked)
            assert all(plain[i] in asked for i in set(range(30)) - {*train, *held_out})
    with pytest.raises(DataError, match="30 rows with 6 different prompts do not split: 6 for"):
        split(hashes(*given), 6, seed=0)
    assert len(split(hashes(*map(str, range(50))), None, seed=0, most=3)[1]) == 3


def test_one_prompt_is_trained_on_and_not_held_out():
    for rows in ([{"prompt": "a", "n": 1}], [{"prompt": "a"}, {"prompt": "A "}]):
        train, validation = load_rows(FilesTask(rows=rows), seed=0)
        assert (train, len(validation)) == (rows, 0)
        assert describe_split(train, validation) == [
            "validation: none, because prompts has only one prompt; give two or more prompts to "
            "hold one out"
        ]
    with pytest.raises(DataError, match=r"do not split: .*use task.validation_rows = 0"):
        load_rows(FilesTask(rows=rows, validation_rows=1), seed=0)


def test_no_row_is_held_out_with_0_rows(tmp_path):
    rows = [{"prompt": prompt} for prompt in ("a", "A ", "b")]
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}')
    for validation in (None, str(tmp_path / "other.jsonl"), str(tmp_path / "missing.jsonl")):
        config = FilesTask(rows=rows, validation=validation, validation_rows=0)
        train, held_out = load_rows(config, seed=0)
        assert (train, len(held_out)) == (rows, 0)
        assert describe_split(train, held_out, 0) == [
            "validation: none, because task.validation_rows = 0; all 3 rows of prompts are trained "
            "on"
        ]
    with pytest.raises(DataError, match="0 rows do not split"):
        load_rows(FilesTask(rows=[], validation_rows=0), seed=0)


def test_messages_are_other_prompts_than_texts():
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "a"}
    assert len(set(hashes("a", [user], [user, user], [system], "aa").tolist())) == 5


def test_the_files_of_a_recipe(tmp_path):
    train = write(tmp_path, *(json.dumps(row) + "\n" for row in ROWS))
    other = write(tmp_path, '{"prompt": "other"}', name="other.jsonl")
    both = load_rows(FilesTask(train=str(train), validation=str(other)), seed=0)
    assert both == (ROWS, [{"prompt": "other"}])
    assert describe_split(*both) == [f"validation: 1 row of {other}"]
    parts = load_rows(FilesTask(train=str(train)), seed=0)
    assert [len(part) for part in parts] == [6, 1]
    assert describe_split(*parts) == [f"validation: 1 of the 7 rows of {train} are held out"]
    with pytest.raises(ConfigError, match="there are no prompts; give --data"):
        load_rows(FilesTask(), seed=0)


def test_prompts_of_a_validation_file_are_not_trained_on(tmp_path):
    train = write(tmp_path, *(json.dumps(row) + "\n" for row in ROWS))
    rows = [{"prompt": "QUESTION  3", "n": 0}, {"prompt": "new", "n": 1}]
    other = write(tmp_path, *(json.dumps(row) + "\n" for row in rows), name="other.jsonl")
    kept, held_out = load_rows(FilesTask(train=str(train), validation=str(other)), seed=0)
    assert held_out == rows
    assert kept == [row for row in ROWS if row["n"] != 3]
    assert describe_split(kept, held_out)[1] == (
        f"1 row of {train} with the prompt of a validation row: not trained on"
    )
    none = load_rows(FilesTask(train=str(other), validation=str(other)), seed=0)
    with pytest.raises(DataError, match=r"no row of .*other.jsonl is left to train on"):
        check_trainable(*none)


def test_columns_are_fields_and_rows_keep_their_own():
    row = {"question": "q", "solution": "s", "prompt": "other"}
    config = FilesTask(rows=[row], columns={"prompt": "question", "answer": "solution"})
    (found,) = load_rows(config, seed=0)[0]
    assert found == row | {"prompt": "q", "answer": "s"}
    config = FilesTask(rows=[row], columns={"prompt": "qestion"})
    said = "no column 'qestion' for task.columns.prompt, only 'question', 'solution', 'prompt'"
    with pytest.raises(DataError, match=rf"prompts\[0\]: {said}; did you mean 'question'\?"):
        load_rows(config, seed=0)
    with pytest.raises(ValidationError, match=r"use columns.question = 'x'"):
        MathTask(columns={"prompt": "x"})
    with pytest.raises(ValidationError, match=r"use columns.prompt = 'x'"):
        PairsTask(columns={"question": "x"})


def test_a_system_message_needs_a_chat_and_no_other_system_message():
    system = {"role": "system", "content": "s"}
    rows = [{"prompt": "text"}, {"prompt": [system, {"role": "user", "content": "u"}]}]
    load_rows(FilesTask(rows=rows[:1], system="Be brief."), seed=0)
    with pytest.raises(DataError, match=r"prompts\[0\]: task.system needs chat messages"):
        load_rows(FilesTask(rows=rows[:1], system="Be brief.", chat=False), seed=0)
    with pytest.raises(DataError, match=r"prompts\[1\]: the prompt has a system message"):
        load_rows(FilesTask(rows=rows, system="Be brief."), seed=0)
    with pytest.raises(ValidationError, match="chat = false makes every prompt plain text"):
        MathTask(system="Be brief.")
