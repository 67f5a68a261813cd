"""JSON lines read by offsets are the same rows as those of a file in memory."""

import json
import os
import pickle

import pytest

from burnish.errors import DataError
from burnish.tasks.data import lines
from burnish.tasks.data.lines import JoinedRows, JsonLines

ROWS = [{"prompt": f"é {i}" * (i + 1), "n": i} for i in range(40)]
TEXTS = [
    "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode() + end
    for end in (b"", b"\n")
]


@pytest.mark.parametrize("text", [*TEXTS, lines.BOM + TEXTS[1], TEXTS[0].replace(b"\n", b"\r\n")])
def test_offsets_give_the_rows_of_the_lines(tmp_path, monkeypatch, text):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text)
    whole = JsonLines(file)
    monkeypatch.setattr(lines, "IN_MEMORY", 10)
    monkeypatch.setattr(lines, "BLOCK", 7)
    by_offsets = JsonLines(file)
    for source in (whole, by_offsets, pickle.loads(pickle.dumps(by_offsets))):
        assert [source.read(i) for i in range(len(source))] == list(source.scan()) == ROWS
        assert source.place(39) == f"{file}, line 40"
    with file.open("ab") as opened:
        opened.write(b'\n{"prompt": 1')
    assert whole.read(3) == ROWS[3]  # a run does not see what is written later
    with pytest.raises(DataError, match="has changed since it was opened"):
        by_offsets.read(3)
    changed = JsonLines(file)
    with pytest.raises(DataError, match="not JSON"):
        changed.read(len(changed) - 1)
    os.remove(file)
    with pytest.raises(DataError, match="can't be read: No such file"):
        list(changed.scan())


@pytest.mark.parametrize("size", [0, 10])
def test_empty_files_and_lines(tmp_path, monkeypatch, size):
    monkeypatch.setattr(lines, "IN_MEMORY", 0 if size else 100)
    file = tmp_path / "rows.jsonl"
    for text in (b"", b"\n", lines.BOM, lines.BOM + b"\n"):
        file.write_bytes(text)
        with pytest.raises(DataError, match="holds no rows"):
            JsonLines(file)
    file.write_bytes(b"1\n\n")
    assert len(JsonLines(file)) == 2
    with pytest.raises(DataError, match="line 2: not JSON"):
        list(JsonLines(file).scan())


def test_several_files_are_one_after_the_other(tmp_path):
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for file, part in zip(files, (ROWS[:1], ROWS[1:5], ROWS[5:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    joined = JoinedRows([JsonLines(file) for file in files], "all")
    assert [joined.read(i) for i in range(len(joined))] == list(joined.scan()) == ROWS
    assert [joined.place(i) for i in (0, 1, 39)] == [
        f"{files[0]}, line 1",
        f"{files[1]}, line 1",
        f"{files[2]}, line 35",
    ]
