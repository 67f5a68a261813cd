"""Replies are checked again when they arrive, because an environment may have written them."""

import pytest

from burnish.environments.episode import LENGTH, framed, read_reply
from burnish.environments.protocol import Observation


def test_a_message_is_preceded_by_its_length():
    assert framed(b"abc") == LENGTH.pack(3) + b"abc" == b"\0\0\0\x03abc"


def test_replies():
    user = {"role": "user", "content": "go"}
    assert read_reply(b'{"messages": "go"}', "reset") == Observation([user], None, False, {})
    assert read_reply(b'{"messages": "go", "reward": 2}', "step").reward == 2.0
    assert read_reply(b"{}", "close").error is None
    assert read_reply(b'{"error": "no"}', "close").error == "no"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"3", b"[]", b"{}", b'{"messages": 3}', b'{"reward": NaN, "messages": 1}',
     b"[" * 100_000],
)  # fmt: skip
@pytest.mark.parametrize("call", ["reset", "step"])
def test_replies_against_the_rules(content, call):
    found = read_reply(content, call)
    assert found.error.startswith("the environment's process sent an invalid reply: ")
