"""Rows of pairs: which are refused, and why."""

import json

import pytest

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.tasks import PairsTask
from burnish.tasks.pairs import check_pair, write_pair
from burnish.tasks.rows import load_rows
from tests.conftest import byte_tokenizer
from tests.learner.preference_pairs import ROWS, groups

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and 4"},
    {"role": "user", "content": "quickly"},
    {"role": "assistant", "content": "7"},
]
BROKEN = {"function": {"name": "add", "arguments": "{"}}
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}


def written(row, tokenizer=None, context=500, **config):
    checked = check_pair(row, "row 0")
    return write_pair(checked, PairsTask(**config), tokenizer or Tokenizer.of_bytes(), context)


def test_a_conversation_teaches_all_messages_of_the_assistant():
    tokenizer = Tokenizer.of_bytes()
    group = written({"messages": TALK, "answer": "9"}, tokenizer)
    (response,) = group.completions
    assert tokenizer.decode(group.prompt.token_ids) == "Add.\n1+2\n" == group.prompt.text
    assert tokenizer.decode(response.token_ids) == "3<end>and 4\nquickly\n7<end>"
    assert tokenizer.decode(response.token_ids[response.sampled]) == "3<end>7<end>"
    assert tokenizer.decode(response.token_ids[~response.sampled]) == "and 4\nquickly\n"
    assert response.text == "3and 4\nquickly\n7"
    # With a prompt or a question, messages are another column of the row.
    pair = written({"prompt": TALK[:2], "answer": "3", "messages": TALK}, byte_ends())
    (one,) = written({"messages": TALK[:3]}, byte_ends()).completions
    assert one.token_ids.tolist() == pair.completions[0].token_ids.tolist()
    assert (one.finish, one.stop) == (pair.completions[0].finish, pair.completions[0].stop)


def byte_ends():
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.end_ids = (10,)
    return tokenizer


def test_a_system_message_of_the_task_comes_first():
    group = written({"messages": TALK[1:]}, byte_ends(), system="Be brief.")
    assert group.prompt.text.startswith("<system>Be brief.<user>1+2<assistant>")


def test_conversations_that_are_refused():
    asked, answered = TALK[1], TALK[2]
    for row, said in (
        ({"messages": "hi"}, "messages must be a list of objects"),
        ({"messages": []}, "end with the assistant's message, got none"),
        ({"messages": [answered]}, "must begin with another role .* got assistant"),
        ({"messages": [asked]}, "must .* end with the assistant's message, got user"),
        ({"messages": [asked, answered, answered]}, "two messages of the assistant follow"),
        ({"messages": [asked, {"role": "assistant", "content": " "}]}, "is empty; leave"),
        ({"messages": [asked, {"role": "assistant"}]}, "a message is an object"),
        ({"messages": [asked, {**answered, "role": "bot"}, answered]}, "role must be one of"),
        ({"messages": [asked, {**answered, "tool_calls": [{"name": 1}]}]}, "a tool call is"),
        ({"messages": [asked, {**answered, "tool_calls": [BROKEN]}]}, "a tool call is"),
        ({"messages": TALK, "tools": "[{"}, "tools must be a list or its JSON text"),
        ({"messages": TALK, "tools": {"a": 1}}, "tools must be a list of JSON schemas"),
        ({"messages": [*TALK[:2], {**answered, "content": "\ud83d"}]}, "whole characters"),
    ):
        with pytest.raises(DataError, match=f"row 0: .*{said}"):
            written(row)
    with pytest.raises(DataError, match=r"row 0: .*task\.prompt or task\.answer is set"):
        written({"messages": TALK}, prompt="{prompt}!")
    with pytest.raises(DataError, match=r"the prompt and its longest response are 27 tokens"):
        written({"messages": TALK}, context=26)


def test_tools_may_be_a_json_text_and_a_call_may_have_no_content():
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [TALK[1], asked, {"role": "tool", "content": "3"}, TALK[2]]
    for tools in (None, [], "[]", [{"name": "add"}], json.dumps([{"name": "add"}])):
        row = check_pair({"messages": messages, "tools": tools}, "row 0")
        assert row["tools"] == ([{"name": "add"}] if tools and "add" in str(tools) else [])
        assert row["prompt"] == TALK[1:2]
        assert row["messages"][1] == {**asked, "content": ""}


def test_rows_that_are_no_pairs_are_refused():
    for change, said in (
        ({"chosen": ""}, "needs a text 'chosen'"),
        ({"rejected": 3}, "needs a text 'rejected'"),
        ({"rejected": ROWS[0]["chosen"]}, "are the same text"),
    ):
        with pytest.raises(DataError, match=f"row 0: .*{said}"):
            groups([ROWS[0] | change])
    with pytest.raises(DataError, match=r"its longest response are 19 tokens, .* is 18"):
        groups(context=18)
    with pytest.raises(DataError, match=r"all its responses are 23 tokens, .* is 22"):
        groups(together=22)


def test_conversations_that_begin_alike_are_held_out_as_a_whole(tmp_path):
    rows = [
        {"messages": [TALK[1], {"role": "assistant", "content": str(n)}], "n": n} for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, rows[0]])
    )
    config = PairsTask(train=str(tmp_path / "rows.jsonl"), validation_rows=4)
    train, validation = load_rows(config, seed=0, check=check_pair)
    held_out = {row["n"] for row in validation}
    assert len(held_out) == 4
    assert {row["n"] for row in train} == {*range(9)} - held_out
