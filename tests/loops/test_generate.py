from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from burnish.errors import DataError
from burnish.loops.generate import generate, read_prompts
from burnish.types import SamplingParams
from burnish.wording import printable


def test_answers_come_in_the_prompts_order_and_the_first_is_streamed() -> None:
    written: list[str] = []
    prompts = ["first", "second, which is longer"]
    params = SamplingParams(max_tokens=9)
    answers = generate(
        tiny.engine(text=True), tiny.tokenizer(), prompts, n=2, params=params, write=written.append
    )
    assert [(answer.prompt, answer.sample) for answer in answers] == [
        (prompt, sample) for prompt in prompts for sample in range(2)
    ]
    assert "".join(written) == answers[0].text
    assert sum(map(bool, written)) > 2
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) <= 9
        assert answer.logprob == sum(answer.logprobs)


def test_terminal_control_is_spelled_out() -> None:
    assert printable("a\x1b[31m\x07\r\x9b\u202eb\n\t漢👩\u200d🚀") == (
        "a\\x1b[31m\\x07\\r\\x9b\\u202eb\n\t漢👩\u200d🚀"
    )


def test_prompts_from_files(tmp_path: Path) -> None:
    plain, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("one\n\ntwo\n")
    rows.write_text('{"prompt": "one\\nline", "other": 1}\n')
    assert read_prompts(plain) == ["one", "two"]
    assert read_prompts(rows) == ["one\nline"]
    for content, message in (
        ("", "holds no rows"),
        ("{", "not JSON"),
        ('{"p": 1}', "no field 'prompt'"),
    ):
        rows.write_text(content)
        with pytest.raises(DataError, match=message):
            read_prompts(rows)
    plain.write_text("\n")
    with pytest.raises(DataError, match="at least one"):
        read_prompts(plain)
    with pytest.raises(DataError, match="can't be read"):
        read_prompts(tmp_path / "absent")
