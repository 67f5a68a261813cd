from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from burnish.errors import DataError
from burnish.loops.generate import generate, read_prompts
from burnish.types import SamplingParams
from burnish.wording import printable


def test_samples_are_written_in_order_and_kept(tmp_path: Path) -> None:
    written: list[str] = []
    engine = tiny.engine(text=True)
    prompts = ["first\x1b[2J", "second, which is longer"]
    params = SamplingParams(max_tokens=9)
    out = tmp_path / "out.jsonl"
    ticks = iter([1.0, 3.0])
    speed = generate(
        engine,
        tiny.tokenizer(),
        prompts,
        n=2,
        params=params,
        write=written.append,
        jsonl=out,
        clock=lambda: next(ticks),
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        (prompt, sample) for prompt in prompts for sample in range(2)
    ]
    expected = "".join(
        f"── prompt {i // 2 + 1}, sample {i % 2 + 1} ──\n{printable(row['text'])}\n"
        for i, row in enumerate(rows)
    )
    assert "".join(written) == expected
    assert speed.tokens == sum(len(row["token_ids"]) for row in rows)
    assert (speed.samples, speed.tokens_per_second) == (4, speed.tokens / 2)
    assert str(speed).endswith("tokens per second")
    assert list(tmp_path.iterdir()) == [out]


def test_one_sample_streams_without_a_heading() -> None:
    written: list[str] = []
    engine = tiny.engine(text=True)
    params = SamplingParams(max_tokens=20)
    generate(engine, tiny.tokenizer(), ["a"], params=params, write=written.append)
    assert sum(bool(piece) for piece in written) > 5
    assert not any(piece.startswith("──") for piece in written)


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
        ("", "at least one"),
        ("{", "not JSON"),
        ('{"p": 1}', 'text "prompt"'),
    ):
        rows.write_text(content)
        with pytest.raises(DataError, match=message):
            read_prompts(rows)
    with pytest.raises(DataError, match="can't be read"):
        read_prompts(tmp_path / "absent")
