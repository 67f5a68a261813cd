import json
import os
import subprocess
from pathlib import Path

import pytest

from burnish.errors import RunError
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.runs.directory import RunDirectory, check_new, claimed, environment, origin
from burnish.runs.metrics import iterate_rows

RECIPE = recipe_to_toml(load_recipe("sort"))


def test_a_directory_belongs_to_one_run(tmp_path):
    with RunDirectory(tmp_path / "run", RECIPE) as run:
        with pytest.raises(RunError, match="in use by another process"):
            RunDirectory(tmp_path / "run")
        run.append_row("metrics.jsonl", {"step": 0})
        assert list(iterate_rows(tmp_path / "run" / "metrics.jsonl")) == [{"step": 0}]
    with pytest.raises(RunError, match=r"must be new or empty.* with `burnish resume .*run`"):
        RunDirectory(tmp_path / "run", RECIPE)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for check in (check_new, lambda path: RunDirectory(path, RECIPE)):
        with pytest.raises(RunError, match=r"can't write to .* choose another --out"):
            check(tmp_path / "file" / "run")


def test_writes_replace_files_whole(tmp_path):
    with RunDirectory(tmp_path / "run", RECIPE, environment=environment("cpu")) as run:
        run.write("a.txt", "one")
        run.write("a.txt", "two")
    assert (tmp_path / "run" / "a.txt").read_text() == "two"
    assert sorted(os.listdir(tmp_path / "run")) == [
        ".lock",
        "a.txt",
        "environment.json",
        "recipe.toml",
    ]
    packages = json.loads((tmp_path / "run" / "environment.json").read_text())["packages"]
    assert packages["numpy"]


def test_the_commit_and_the_command_of_a_run_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["burnish", "train", "my recipe.toml"])
    assert origin(tmp_path)["commit"] is None
    assert origin(tmp_path)["command"] == "burnish train 'my recipe.toml'"
    assert origin(tmp_path)["directory"] == str(Path.cwd())
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        (tmp_path / "file").write_text("1")
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    found = origin(tmp_path)
    assert len(found["commit"]) == 40
    assert found["modified"] is False
    (tmp_path / "file").write_text("2")
    assert origin(tmp_path) == found | {"modified": True}
    monkeypatch.setenv("PATH", str(tmp_path))  # git is not installed
    assert origin(tmp_path)["commit"] is None


def test_a_directory_is_taken_at_once_and_left_again_if_nothing_came_of_it(tmp_path):
    root = tmp_path / "runs"
    with claimed(None, "sort", root) as one, claimed(None, "sort", root) as two:
        assert [one.name, two.name] == ["sort-1", "sort-2"]
        with RunDirectory(two, RECIPE):
            pass
    assert [path.name for path in root.iterdir()] == ["sort-2"]
    with claimed(None, "other", tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()
    with claimed(tmp_path / "mine", "sort", root) as path:
        assert path == tmp_path / "mine"
    assert not path.exists()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), claimed(None, "sort", tmp_path / "file"):
        pass


def test_a_reopened_run_is_cut_back_to_its_checkpoint(tmp_path):
    def work(run, steps):
        for step in steps:
            run.append_row("metrics.jsonl", {"step": step})
            run.append("log.txt", f"step {step} 🙂\n")
            if step > 3:
                run.append_row("evaluations.jsonl", {"step": step})

    def contents(path):
        return {f.name: f.read_bytes() for f in path.iterdir() if f.is_file()}

    with RunDirectory(tmp_path / "whole", RECIPE) as run:
        work(run, range(6))
    with RunDirectory(tmp_path / "killed", RECIPE) as run:
        work(run, range(3))
        positions = run.positions()
        work(run, range(3, 5))
        run.append("metrics.jsonl", '{"step": 5, "rew')
        run.write("summary.json", "{}")
    assert sorted(positions) == ["log.txt", "metrics.jsonl"]
    with RunDirectory(tmp_path / "killed") as run:
        with pytest.raises(RunError, match="in use by another process; watch it"):
            RunDirectory(tmp_path / "killed")
        run.append("metrics.jsonl", "written before the cut\n")
        run.cut_back(positions)
        assert run.positions() == positions
        work(run, range(3, 6))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_file_shorter_than_its_checkpoint_is_an_error_and_nothing_is_cut(tmp_path):
    with RunDirectory(tmp_path, RECIPE) as run:
        run.append("log.txt", "0123456789")
        run.append("metrics.jsonl", "0123456789")
        with pytest.raises(RunError, match=r"metrics\.jsonl holds 10 bytes.*recorded 12.*--from"):
            run.cut_back({"log.txt": 5, "metrics.jsonl": 12})
        assert run.positions() == {"log.txt": 10, "metrics.jsonl": 10}


def test_only_a_run_can_be_reopened(tmp_path):
    with pytest.raises(RunError, match=r"no recipe\.toml"):
        RunDirectory(tmp_path / "none")
    assert not (tmp_path / "none").exists()
