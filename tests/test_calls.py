"""Tool calls are read from the text of a model, and what is wrong with a malformed one is said."""

import json
import random
import string

import pytest

from burnish.calls import CALL_FORMATS, MOST_LEVELS, ToolCall, parse_json, read_calls

ADD = ToolCall("add", {"a": 1, "b": 2})
HERMES = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
PLAIN = 'call add {"a": 1, "b": 2}'


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("hermes", HERMES, 1),
        ("hermes", f"I add.\n{HERMES} and again\n{HERMES}\nyes", 2),
        ("hermes", f"<think>{HERMES}</think>{HERMES}", 1),
        ("hermes", f"{HERMES}</think>{HERMES}", 1),
        ("hermes", f"{HERMES}<think>{HERMES}", 1),
        ("hermes", f"<think>{HERMES}", 0),
        ("hermes", "the answer is 3", 0),
        ("hermes", LLAMA + PLAIN, 0),
        ("llama", LLAMA, 1),
        ("llama", f"<|python_tag|>{LLAMA}", 1),
        ("llama", f" {LLAMA}; {LLAMA}\n{LLAMA} ", 3),
        ("llama", LLAMA.replace("parameters", "arguments"), 1),
        ("llama", f"It is {LLAMA}", 0),
        ("llama", '{"answer": 3}', 0),
        ("plain", PLAIN, 1),
        ("plain", f"I add.\n  {PLAIN}\nand\n{PLAIN}", 2),
        ("plain", "I call add", 0),
        ("plain", "", 0),
    ],
)
def test_calls_in_a_message(name, text, count):
    assert read_calls(text, name) == [ADD] * count


def test_a_plain_call_needs_no_arguments():
    assert read_calls("call now", "plain") == [ToolCall("now", {})]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", "<tool_call>add</tool_call>", "the JSON object is invalid: Expecting value"),
        ("hermes", "<tool_call>", "Expecting value; got: nothing"),
        ("hermes", HERMES.removesuffix("</tool_call>"), "must end with </tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>", 'a call is written as {"name": NAME, "arg'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', '"arguments" must be a JSON object'),
        ("hermes", HERMES.replace("1", "NaN"), "NaN is no JSON number"),
        ("hermes", HERMES.replace("1", "[" * 100_000), "nested too deeply"),
        ("hermes", HERMES.replace("1", "[" * 101 + "]" * 101), "has more than 100 levels"),
        ("plain", PLAIN.replace("1", '{"a":' * 400 + "1" + "}" * 400), "has more than 100 levels"),
        ("plain", PLAIN.replace("1", r'"\ud800"'), "contains half of a surrogate pair"),
        ("llama", LLAMA.replace("1", r'["é\uDFFF"]'), "contains half of a surrogate pair"),
        ("hermes", HERMES.replace('"a"', r'"\ud83d"'), "contains half of a surrogate pair"),
        ("llama", LLAMA.replace("add", r"\ud800"), "contains half of a surrogate pair"),
        ("hermes", HERMES.replace("1", "1" * 5000), "an integer has more than 1000 digits"),
        ("plain", PLAIN.replace("1", "-1e999"), "-1e999 is no finite number"),
        ("llama", LLAMA[:-1], "the JSON object is invalid: Expecting ',' delimiter"),
        ("llama", '{"name": "f", "parameters": 3}', '"parameters" must be a JSON object'),
        ("llama", "<|python_tag|>print(1)", "the JSON object is invalid"),
        ("llama", "<|python_tag|>", "a JSON object must follow the tag"),
        ("plain", "call", "a call is written as: call NAME"),
        ("plain", 'call {"a": 1}', "a call is written as: call NAME"),
        ("plain", "call add 1 2", "the JSON object is invalid: Extra data; got: 1 2"),
        ("plain", "call add [1]", "the arguments must be a JSON object"),
    ],
)
def test_malformed_calls_say_what_is_wrong(name, text, said):
    (call,) = read_calls(text, name)
    assert said in call.error
    assert len(call.error) < 250


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_pairs_of_surrogates_and_nested_values_are_read(name):
    value = "x"
    for _ in range(MOST_LEVELS // 2 - 2):
        value = {"a": [value]}
    call = ToolCall("add", {"a": "😀", "b": value})
    assert read_calls(CALL_FORMATS[name].write([call]), name) == [call]
    text = CALL_FORMATS[name].write([call._replace(arguments={"a": "?"})])
    (read,) = read_calls(text.replace("?", r"\ud83d\ude00"), name)
    assert read.arguments == {"a": "😀"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 101 + "]" * 101, "more than 100 levels"),
        (r'{"\udc00": 1}', "half of a surrogate pair"),
        ("{", "Expecting property name"),
        ("[Infinity]", "Infinity is no JSON number"),
    ],
)
def test_parse_json_says_what_is_wrong(text, said):
    with pytest.raises(ValueError, match=said):
        parse_json(text)
    assert parse_json("[" * 100 + "]" * 100)


def test_a_malformed_call_hides_no_other():
    for name, bad, good in (
        ("hermes", "<tool_call>x</tool_call>", HERMES),
        ("plain", "call", PLAIN),
    ):
        calls = read_calls(f"{good}\n{bad}\n{good}", name)
        assert [call.error is None for call in calls] == [True, False, True]
    calls = read_calls(f"{LLAMA} is how", "llama")
    assert [call.error is None for call in calls] == [True, False]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_damaged_calls_never_raise(name):
    """Random edits of calls, and random texts of their characters, are read as calls or errors."""
    draw = random.Random(0)
    texts = {"hermes": HERMES, "llama": f"{LLAMA}; {LLAMA}", "plain": f"{PLAIN}\n{PLAIN}"}
    characters = texts[name] + string.printable + "\u2028\ud800é"
    for _ in range(3000):
        text = list(texts[name])
        for _ in range(draw.randrange(1, 5)):
            place = draw.randrange(len(text))
            text[place : place + draw.randrange(4)] = draw.choices(characters, k=draw.randrange(4))
            text = text or ["{"]
        for call in read_calls("".join(text), name):
            assert isinstance(call.name, str)
            assert isinstance(call.arguments, dict)
            json.dumps(call.arguments, allow_nan=False)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_random_calls_are_read_as_they_were_written(name):
    draw = random.Random(1)
    for _ in range(300):
        calls = [
            ToolCall(f"tool_{draw.randrange(9)}", {f"k{i}": _value(draw) for i in range(3)})
            for _ in range(draw.randrange(1, 4))
        ]
        assert read_calls(CALL_FORMATS[name].write(calls), name) == calls


def _value(draw):
    texts = ["", "</tool_call>", '{"name"', "a\nb", "call add {}", "é;\u2028", "\\"]
    return draw.choice([None, True, 2**70, 0.1, [1, {"x": []}], *texts])
