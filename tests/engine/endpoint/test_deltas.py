"""Text in pieces: joined, they are the text, and nothing that is sent must be taken back."""

import random

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.calls import CALL_FORMATS, split_calls, text_before_calls
from burnish.engine.endpoint.deltas import TextDeltas
from burnish.engine.endpoint.messages import assistant_message

TOKENIZER = tiny.tokenizer()
PARTS = [
    *["a", " ", "\n", "é", "🙂", "stop", "st", "<", "</think>", "<think>", "x stop y", ";", "{"],
    *["<tool_call>", "</tool_call>", "<tool_", "call ", "call", "call f {}\n", '{"name": "f"'],
    *['{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}', "<|a|>"],
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
FORMATS = st.sampled_from([None, *CALL_FORMATS])


def pieces(text, cuts, stops=(), calls=None):
    """The pieces that are sent while the text's tokens arrive, up to each of the ``cuts``."""
    deltas = TextDeltas(TOKENIZER, stops, calls)
    tokens, found, start = TOKENIZER.encode(text).tolist(), [], 0
    for end in (*sorted(cuts), len(tokens)):
        found.append(deltas.add(tokens[start:end]))
        start = max(start, end)
    return found, deltas


@settings(max_examples=300, deadline=None)
@given(TEXTS, FORMATS, st.lists(st.integers(0, 60), max_size=6))
def test_the_pieces_are_the_content(text, calls, cuts):
    text = text.replace("<|a|>", "")
    found, deltas = pieces(text, cuts, calls=calls)
    content = assistant_message(text, calls, "x")["content"] or ""
    sent = "".join(found)
    assert content.startswith(sent)
    assert sent + deltas.finish(content) == content


@settings(max_examples=300, deadline=None)
@given(TEXTS, FORMATS, st.lists(st.integers(0, 60), max_size=6))
def test_no_part_of_a_stop_string_is_sent(text, calls, cuts):
    stops = ("stop", "y\n", "é")
    text = text.replace("<|a|>", "")
    ends = [text.index(stop) for stop in stops if stop in text]
    content = text[: min(ends)] if ends else text
    found, deltas = pieces(text, cuts, stops, calls)
    final = assistant_message(content, calls, "x")["content"] or ""
    assert "".join(found) + deltas.finish(final) == final


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, tiny.VOCAB - 1), max_size=40))
def test_random_tokens_are_decoded_as_a_whole(tokens):
    """Tokens of a random model: bytes that are no characters, special tokens, and end tokens."""
    tokens = [token for token in tokens if token != tiny.END]
    deltas = TextDeltas(TOKENIZER)
    found = "".join(deltas.add([token]) for token in tokens)
    text = TOKENIZER.decode(tokens, skip_special=True)
    assert found + deltas.finish(text) == text


def test_a_character_is_sent_with_its_last_token():
    deltas = TextDeltas(TOKENIZER)
    tokens = TOKENIZER.encode("é🙂").tolist()
    assert [deltas.add([token]) for token in tokens] == ["", "é", "", "", "", "🙂"]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_text_before_calls_never_shrinks(name):
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(PARTS, k=6))
        safe = [text_before_calls(text[:end], name, complete=False) for end in range(len(text))]
        assert safe == sorted(safe)
        content, calls = split_calls(text, name)
        assert content.startswith(text[: max(safe, default=0)])
        assert content == text or calls
