import shutil

import pytest

from burnish.errors import DataError
from burnish.tasks.data.names import parse_data_name, parts_of_directory


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hf:org/name", ("hub", "org/name", None, None)),
        ("hf:org/name:test", ("hub", "org/name", None, "test")),
        ("hf:org/name/main:train[:10]", ("hub", "org/name", "main", "train[:10]")),
        ("rows.jsonl", ("jsonl", "rows.jsonl", None, None)),
        ("rows.txt", ("jsonl", "rows.txt", None, None)),
        ("a/*.parquet", ("parquet", "a/*.parquet", None, None)),
        ("a.csv", ("csv", "a.csv", None, None)),
    ],
)
def test_names(name, found):
    parsed = parse_data_name(name)
    assert (parsed.format, parsed.path, parsed.config, parsed.split) == found
    assert parsed.is_table == (parsed.format != "jsonl")
    assert parsed.is_missing == (parsed.format != "hub")


def test_names_that_name_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "rows").mkdir(parents=True)
    with pytest.raises(DataError, match=r"data/rows also exists in this directory; use 'data/r"):
        parse_data_name("hf:data/rows:train")
    shutil.rmtree(tmp_path / "data")
    for name in ("hf:name", "hf:a/b/c/d", "hf:/b:train", "hf:./rows", "hf:~/rows"):
        with pytest.raises(DataError, match=r"the form is hf:ORG/NAME\[/CONFIG\]\[:SPLIT\]"):
            parse_data_name(name)
    for ending in ("csv", "parquet"):
        (tmp_path / f"a.{ending}").touch()
    with pytest.raises(DataError, match=r"several formats \(.csv, .parquet\)"):
        parse_data_name(f"{tmp_path}/*")
    assert parse_data_name(f"{tmp_path}/*.csv").files == [tmp_path / "a.csv"]
    assert parse_data_name(f"{tmp_path}:test").split == "test"


def test_the_parts_of_a_directory(tmp_path):
    def named(*files):
        directory = tmp_path / "-".join(files or ["none"])
        directory.mkdir()
        for file in files:
            (directory / file).touch()
        found = parts_of_directory(directory)
        return [one and one.removeprefix(f"{directory}/") for one in found.values()]

    assert named() == named("train.jsonl") == ["train.jsonl", "validation.jsonl"]
    assert named("train.csv", "validation.csv") == ["train.csv", "validation.csv"]
    assert named("train.parquet", "b.csv") == ["train.parquet", None]
    whole, held_out = named("part-1.parquet")
    assert (whole, held_out) == (f"{tmp_path}/part-1.parquet", None)
