"""Tables that the package datasets reads: every format gives the same rows, and errors name the
column, the split and the remedy."""

import json
import pickle
import shutil
import sys

import pytest

from burnish.errors import DataError, MissingExtra
from burnish.recipe.tasks import FilesTask, MathTask, PairsTask
from burnish.tasks.data.table import import_datasets, save_dataset
from burnish.tasks.math import load_math_rows
from burnish.tasks.pairs import check_pair
from burnish.tasks.rows import describe_split, load_rows, open_source
from tests.conftest import byte_tokenizer

datasets = pytest.importorskip("datasets", reason="the extra data is not installed")
ROWS = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.", "n": i} for i in range(23)]
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"Say {i}."},
            {"role": "assistant", "content": f"It is {i}."},
        ]
    }
    for i in range(12)
]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "burnish"))
    datasets.disable_progress_bars()


def write_all(folder, rows):
    """Write the rows in every format; return their names."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(folder / "rows.parquet")
    table.to_csv(folder / "rows.csv")
    for number, part in enumerate((range(10), range(10, len(rows)))):
        table.select(part).to_parquet(folder / f"part-{number}.parquet")
    table.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=table, test=table.select([1, 2])).save_to_disk(folder / "splits")
    arrow = next((folder / "saved").glob("*.arrow"))
    shutil.copy(arrow, folder / "rows.arrow")
    names = ("rows.jsonl", "rows.parquet", "rows.csv", "part-*.parquet", "saved", "splits:train")
    return [str(folder / name) for name in (*names, "splits", "rows.arrow")]


def test_every_format_gives_the_same_rows_and_the_same_split(tmp_path):
    names = write_all(tmp_path, ROWS)
    for seed in (0, 1):
        parts = []
        for name in names:
            config = FilesTask(train=name, columns={"prompt": "question"})
            parts.append(load_rows(config, seed=seed))
        for train, validation in parts:
            assert (list(train), list(validation)) == tuple(map(list, parts[0]))
            assert train[5] == list(train)[5]
            assert pickle.loads(pickle.dumps(train)) == train
    expected = {**ROWS[0], "prompt": ROWS[0]["question"]}
    assert load_rows(config, seed=0)[0][0] == expected
    both = FilesTask(
        train=names[0], validation=f"{tmp_path}/splits:test", columns={"prompt": "question"}
    )
    train, validation = load_rows(both, seed=0)
    assert (len(train), [row["n"] for row in validation]) == (21, [1, 2])


def test_chat_messages_and_their_last_answer(tmp_path):
    file = str(tmp_path / "rows.parquet")
    rows = [{"messages": [dict(message) for message in row["messages"]]} for row in CHAT]
    rows[3]["messages"][0]["name"] = "someone"  # the table then gives every message a name
    datasets.Dataset.from_list(rows).to_parquet(file)
    config = PairsTask(train=file, columns={"prompt": "messages"})
    train, validation = load_rows(config, seed=0, check=check_pair)
    found = sorted([*train, *validation], key=lambda row: int(row["answer"][6:-1]))
    assert [row["answer"] for row in found] == [f"It is {i}." for i in range(12)]
    assert [row["prompt"] for row in found] == [row["messages"][:1] for row in rows]
    assert found[0]["messages"] == rows[0]["messages"]
    asked = FilesTask(train=file, columns={"prompt": "messages"})
    assert load_rows(asked, seed=0)[0][0]["prompt"] in [row["messages"] for row in rows]


def test_conversations_with_tool_calls(tmp_path):
    file = str(tmp_path / "rows.parquet")
    calls = [{"function": {"name": "f", "arguments": '{"a": null}'}}]
    rows = [
        {
            "messages": [
                *row["messages"][:1],
                {"role": "assistant", "content": "", "tool_calls": calls},
            ]
        }
        if i % 2
        else {"messages": row["messages"]}
        for i, row in enumerate(CHAT)
    ]
    datasets.Dataset.from_list(rows).to_parquet(file)
    train, validation = load_rows(PairsTask(train=file), seed=0, check=check_pair)
    found = [*train, *validation]
    assert all(row["messages"] in [given["messages"] for given in rows] for row in found)
    assert sum("tool_calls" in row["messages"][1] for row in found) == len(rows) // 2


def test_a_list_for_each_field_of_messages_is_read_as_messages(tmp_path):
    columns = {"role": ["user"], "content": ["hi"]}
    table = datasets.Dataset.from_dict({"prompt": [columns, columns]})
    table.to_parquet(tmp_path / "a.parquet")
    assert open_source(f"{tmp_path}/a.parquet", "train").read(1) == {
        "prompt": [{"role": "user", "content": "hi"}]
    }


def test_columns_that_are_missing_binary_or_no_text(tmp_path):
    table = datasets.Dataset.from_dict(
        {
            "prompt": ["a", "b", "c"],
            "none": ["a", None, "c"],
            "nested": [[["a"]]] * 3,
            "raw": [b"1"] * 3,
            "picture": [{"bytes": b"1", "path": None}] * 3,
        }
    )
    table = table.cast_column("picture", datasets.Image(decode=False))
    table.to_parquet(tmp_path / "a.parquet")
    file = f"{tmp_path}/a.parquet"
    parts = load_rows(FilesTask(train=file), seed=0)
    assert set(parts[0][0]) == {"prompt", "none", "nested"}
    assert describe_split(*parts)[1].endswith("without the binary data of 'raw', 'picture'")
    for column, message in {
        "promt": r"no column 'promt' for task.columns.prompt, only 'prompt', 'none', 'nested'; did",
        "raw": r"this column of .*a.parquet has binary data \(.*binary.*\), and burnish reads",
        "picture": r"this column of .*a.parquet has binary data \(.*Image",
        "none": r"a.parquet, row 1 \(counted from 0\): prompt must be a text .* got 'None'",
        "nested": r"row 0 \(counted from 0\): prompt must be a text .* got \"\[\['a'\]\]\"",
    }.items():
        with pytest.raises(DataError, match=message):
            load_rows(FilesTask(train=file, columns={"prompt": column}), seed=0)


def test_errors_of_files_and_splits(tmp_path):
    write_all(tmp_path, ROWS)
    (tmp_path / "bad.parquet").write_text("no parquet")
    for name, message in {
        "splits:tset": r"splits has no split 'tset', only train, test; did you mean 'test'\?; name",
        "saved:train": r"saved has no splits, got '.*saved:train'; use '.*saved'",
        "bad.parquet": r"bad.parquet can't be read as parquet data: .*Parquet magic bytes",
    }.items():
        with pytest.raises(DataError, match=message):
            open_source(str(tmp_path / name), "train")
    with pytest.raises(DataError, match="splits has no split 'validation', only train, test"):
        open_source(str(tmp_path / "splits"), "validation")
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(tmp_path / "rows.parquet", folder / f"{split}-00000-of-00001.parquet")
    assert len(open_source(f"{folder.parent}:test", "train")) == 23
    with pytest.raises(DataError, match="hub has no split 'validation', only train, test; name"):
        open_source(str(folder.parent), "validation")


def test_math_rows_of_a_table(tmp_path):
    rows = [{"problem": f"{i} + 1?", "final": i + 1, "answer": "other"} for i in range(9)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    columns = {"question": "problem", "answer": "final"}
    config = MathTask(train=f"{tmp_path}/a.parquet", columns=columns, validation_rows=1)
    train, validation = load_math_rows(config, seed=0)
    found = {row["problem"]: row["answer"] for row in (*train, *validation)}
    assert found == {row["problem"]: [str(row["final"])] for row in rows}


def test_the_hub_offline_and_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    name = "hf:org/name:train"
    with pytest.raises(DataError, match=r"hf:org/name:train is neither reachable nor in the cache"):
        open_source(name, "train")
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "train.parquet")
    made = datasets.load_dataset("parquet", data_files={"train": str(tmp_path / "train.parquet")})
    (folder,) = {file["filename"].rpartition("/")[0] for file in made["train"].cache_files}
    target = tmp_path / "cache" / "org___name" / "default" / "0.0.0" / "11"
    target.parent.mkdir(parents=True)
    shutil.copytree(folder, target)
    for file in target.glob("parquet-*.arrow"):
        file.rename(target / file.name.replace("parquet-", "name-"))
    info = json.loads((target / "dataset_info.json").read_text())
    info |= {"builder_name": "name", "dataset_name": "name"}
    (target / "dataset_info.json").write_text(json.dumps(info))
    found = open_source(name, "train")
    assert list(found.scan()) == ROWS
    assert len(open_source("hf:org/name:train[:5]", "train")) == 5
    with pytest.raises(DataError, match=r"hf:org/name has no split 'validation', only train; name"):
        open_source("hf:org/name", "validation")


def test_objects_of_a_script_are_saved_once(tmp_path):
    pandas = pytest.importorskip("pandas")
    table = datasets.Dataset.from_list(ROWS)
    frame = pandas.DataFrame(ROWS, index=range(5, 28))
    first, again = save_dataset(table), save_dataset(datasets.Dataset.from_list(ROWS))
    assert first == again
    assert first["validation"] is None
    for saved in (first, save_dataset(frame)):
        assert list(open_source(saved["train"], "train").scan()) == ROWS
    few = save_dataset(table.select([3, 1]))
    assert [row["n"] for row in open_source(few["train"], "train").scan()] == [3, 1]
    both = save_dataset(datasets.DatasetDict(train=table, test=table.select([3, 1])))
    assert both == {"train": first["train"], "validation": few["train"]}
    for given, message in (
        (table.to_iterable_dataset(), "must have random access, got a streamed IterableDataset"),
        (datasets.DatasetDict(test=table), "no split 'train', only test"),
        (pandas.DataFrame({"prompt": ["a", 3]}), "can't be converted to a table: .*column prompt"),
    ):
        with pytest.raises(DataError, match=message):
            save_dataset(given)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"'hf:a/b' needs the optional part 'data'; install it"):
        import_datasets("task.train = 'hf:a/b'")


def test_system_messages_and_templates():
    from burnish.errors import ModelError
    from burnish.tasks.text import check_system, encode_prompt

    tokenizer = byte_tokenizer()
    check_system(tokenizer, "Be brief.")
    for content in ("hi", [{"role": "user", "content": "hi"}]):
        text, _ = encode_prompt(tokenizer, content, chat=True, system="Be brief.")
        assert text == "<system>Be brief.<user>hi<assistant>2026"
    template = "{{ messages[-1]['content'] }}"
    for given, reason in (
        (None, "this model has no chat template; remove"),
        (template, "its chat template leaves the message out"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
    ):
        with pytest.raises(ModelError, match=f"task.system needs a model .*: .*{reason}"):
            check_system(byte_tokenizer(given), "Be brief.")
