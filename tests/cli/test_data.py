"""``burnish data``: the rows of built-in recipes, and the commands that learn from them."""

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish import api
from burnish.cli.data import DATA_MAKERS, data_options, write_data
from burnish.errors import ConfigError, DataError
from burnish.launch import preflight
from burnish.recipe.load import list_recipes, load_recipe
from burnish.tasks.rows import read_rows


def answering(good):
    """Answers two samples to a prompt; ``good(i)``: the second answer to prompt i is right."""

    def generate(prompts, *, n, **how):
        answers = []
        for i, prompt in enumerate(prompts):
            words = prompt.partition("words: ")[2].rstrip(".").split(", ")
            right = f" Here are {' and '.join(words)}. \n"
            texts = ("nothing", right if good(i) else "neither")
            answers += [SimpleNamespace(prompt=prompt, text=t, finish="stop") for t in texts]
        return answers

    return generate


def test_only_responses_with_the_words_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "generate", answering(lambda i: i % 3 == 0))
    write_data("words", tmp_path / "new", {"rows": 80, "samples": 2})
    train, validation = (
        read_rows(tmp_path / "new" / f"{name}.jsonl") for name in ("train", "validation")
    )
    assert (len(train), len(validation)) == (64, 16)
    for row in [*train, *validation]:
        assert row["answer"] == f"Here are {' and '.join(row['keywords'])}."
        assert row["prompt"].endswith(f"words: {', '.join(row['keywords'])}.")
    seen = [{w for row in rows for w in row["keywords"]} for rows in (train, validation)]
    assert not seen[0] & seen[1]


def test_a_model_that_never_has_the_words_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "generate", answering(lambda i: False))
    with pytest.raises(DataError, match=r"only 0 of 4 sentences have their words after"):
        write_data("words", tmp_path / "new", {"rows": 5, "samples": 2})
    assert not (tmp_path / "new").exists()


def digests(folder):
    return {f.stem: hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in folder.iterdir()}


def test_small_sums_are_always_the_same(tmp_path):
    command = write_data("small-sums", tmp_path / "new", {})
    assert command == f"burnish sft sums-sft --data {tmp_path / 'new'}"
    assert digests(tmp_path / "new") == {
        "questions": "ec2aaf70fdcad81e",
        "train": "985077feb1af5480",
        "validation": "d2a4e85792f1e8d2",
    }
    write_data("small-sums", tmp_path / "other", {"seed": 1})
    assert digests(tmp_path / "other").items().isdisjoint(digests(tmp_path / "new").items())


def test_sums_are_always_the_same(tmp_path):
    write_data("sums", tmp_path / "new", {"rows": None})
    assert digests(tmp_path / "new") == {
        "train": "ccfae7cb10a7fc4d",
        "validation": "03a7f965663c6199",
    }


def test_every_file_that_a_builtin_recipe_needs_has_a_command(tmp_path, monkeypatch):
    """Files in a directory that a command writes; other recipes read rows of one's own."""
    monkeypatch.chdir(tmp_path)
    for name, command in preflight.COMMANDS.items():
        assert command == f"burnish data {name}"
        assert name in DATA_MAKERS
    assert write_data("small-sums", None, {}) == "burnish sft sums-sft"
    for recipe in map(load_recipe, ("sums", "sums-sft")):
        preflight.check_files(recipe.tasks)
    needed = {
        Path(file).parts[0]
        for recipe in map(load_recipe, list_recipes())
        for task in recipe.tasks.values()
        for file in preflight.files_of_task(task).values()
        if file
    }
    assert needed - {*DATA_MAKERS} == {"gsm8k", "math"}


def test_the_commands_that_learn_name_recipes_with_these_files():
    for name, (_, _, command) in DATA_MAKERS.items():
        recipe = re.fullmatch(r"burnish sft ?([\w-]*)", command)[1] or "sft"
        file = load_recipe(recipe).task.train
        assert file is None or Path(file).parts[0] == name


def test_an_option_without_effect_and_a_folder_in_use_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="--rows has no effect on small-sums; its options are"):
        write_data("small-sums", tmp_path / "new", {"rows": 5})
    with pytest.raises(ConfigError, match="no data 'sum'; the names are small-sums, guess, "):
        write_data("sum", None, {})
    (tmp_path / "mine").write_text("")
    for used in (tmp_path, tmp_path / "mine"):
        with pytest.raises(DataError, match="must be a new or empty directory; choose another"):
            write_data("small-sums", used, {})
    assert data_options(DATA_MAKERS["sums"].make) == {"rows": 4000, "seed": 0}
