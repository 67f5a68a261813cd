"""Why an error ended a run, in words: kind, message, remedy and command."""

import errno
import json
import os
import pickle
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli.main import app
from burnish.errors import (
    ActorDied,
    ActorError,
    ClusterError,
    ConfigError,
    DataError,
    EngineError,
    GraderError,
    RunError,
)
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.runs import directory, failure, report
from burnish.runs.directory import STATUS, RunDirectory
from burnish.runs.report import Failure
from burnish.runs.resuming import command_to_resume

RECIPE = recipe_to_toml(load_recipe("sort"))


def explained(error, path):
    return failure.explain(error, path, "go on")[:3]


def test_a_full_disk_names_path_cause_and_free_bytes(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a"))
    kind, message, remedy = explained(error, tmp_path)
    assert kind == "disk full"
    assert message == f"can't write {tmp_path}/a: no space left on the device"
    assert remedy.startswith("free disk space (")
    assert int(remedy.split("(")[1].split()[0].replace(",", "")) > 0
    quota = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "a"))
    assert "the disk quota is exceeded" in explained(quota, tmp_path)[1]


def test_the_cause_of_an_error_is_found_and_its_message_kept(tmp_path):
    given = RunError("can't save a checkpoint; free disk space")
    given.__cause__ = Exception("I/O error: No space left on device (os error 28)")
    assert explained(given, tmp_path)[:2] == ("disk full", str(given))
    refused = RunError("no")
    refused.__cause__ = PermissionError(errno.EACCES, "Permission denied", "x")
    assert explained(refused, tmp_path)[0] == "read-only"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_directory_that_can_only_be_read(number, tmp_path):
    error = OSError(number, "no writing", str(tmp_path / "a"))
    assert explained(error, tmp_path) == (
        "read-only",
        f"can't write {tmp_path}/a: no writing",
        "make the directory and its files writable",
    )


def test_a_lost_connection_and_a_disk_that_fails(tmp_path):
    reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    kind, message, remedy = explained(reset, tmp_path)
    assert (kind, remedy) == ("network", "check the network and the server at the other end")
    assert "Connection reset by peer" in message
    broken = OSError(errno.EIO, "Input/output error", str(tmp_path / "a"))
    assert explained(broken, tmp_path)[:2] == (
        "storage",
        f"can't write {tmp_path}/a: Input/output error",
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        ActorError("learner: torch.OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_a_lack_of_memory_has_a_command_that_needs_less(error, tmp_path):
    with RunDirectory(tmp_path / "run", RECIPE):
        pass
    kind, message, remedy = explained(error, tmp_path / "run")
    assert kind == "memory"
    assert "\n" not in message
    command = shlex.split(remedy.partition("needs less: ")[2])
    assert command[:3] == ["burnish", "train", str(tmp_path / "run" / "recipe.toml")]
    assert command[3:] == ["--set", "train.micro_sequences=15"]
    assert load_recipe(command[2], [command[4]]).train.micro_sequences == 15


def test_other_errors_keep_their_message_and_class(tmp_path):
    assert explained(DataError("row 3 has no prompt; add one"), tmp_path) == (
        "DataError",
        "row 3 has no prompt; add one",
        "",
    )
    kind, message, remedy = explained(KeyError("x"), tmp_path)
    assert (kind, message) == ("KeyError", "KeyError: 'x'")
    assert remedy == f"{tmp_path}/log.txt has the traceback"
    assert explained(AssertionError(), tmp_path)[1] == "AssertionError"


CORRECT = "correct the cause first, or the error returns; then continue with"
NEW_RUN = (
    "correct the recipe and start a new run; this one keeps its recipe, and resuming it would "
)
ANYWAY = "add --anyway if a reward or data file has changed"


@pytest.mark.parametrize(
    ("error", "is_saved", "advice"),
    [
        (ActorDied("the learner died"), True, "continue with: go on"),
        (EngineError("it closed the connection"), False, "continue with: go on"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False, "continue with: go on"),
        (OSError(errno.ENOSPC, "No space left", "x"), True, "continue with: go on"),
        (ConfigError("it must be below 3; lower it"), True, f"{NEW_RUN}repeat the error"),
        (ClusterError("no Ray cluster answers there"), True, f"{CORRECT}: go on"),
        (RunError("1 of 6 groups teach something"), True, f"{CORRECT}: go on"),
        (KeyError("x"), True, f"{CORRECT}: go on"),
        (GraderError("9 of 9 responses got no grade"), False, f"{CORRECT}: go on"),
        (GraderError("9 of 9 responses got no grade"), True, f"{CORRECT} ({ANYWAY}): go on"),
        (DataError("row 3"), False, f"{CORRECT} (a changed recipe needs a new run): go on"),
    ],
)
def test_the_command_comes_with_the_condition_under_which_it_succeeds(
    error, is_saved, advice, tmp_path, monkeypatch
):
    """A run computes the same again, so only errors of other processes and of the machine may not
    return; what a run has kept is not read again."""
    monkeypatch.setattr(failure.checkpoints, "latest", lambda path: path if is_saved else None)
    command = f"burnish resume {tmp_path}"
    found = failure.explain(error, tmp_path, command)
    assert found.advice == advice.replace("go on", command)
    assert str(found).endswith(found.advice)
    called = failure.explain(error, tmp_path, f"burnish.resume('{tmp_path}', reward=f)")
    assert called.advice == advice.replace("go on", called.command).replace(
        "--anyway", "anyway=True"
    )


def test_the_command_is_one_that_a_shell_reads(tmp_path):
    run = tmp_path / "my run's"
    said = command_to_resume(
        run,
        from_checkpoint="step-00000004",
        anyway=True,
        changes={"train.steps": 9, "engine.url": "tcp://a:1"},
    )
    assert shlex.split(said) == [
        *("burnish", "resume", str(run), "--from", "step-00000004", "--anyway"),
        *("--set", "train.steps=9", "--set", 'engine.url="tcp://a:1"'),
    ]
    assert command_to_resume(Path("-run")) == "burnish resume ./-run"


def test_a_python_function_as_the_reward_is_passed_again(tmp_path):
    inputs = {"inputs": {"reward": "short (12ab)"}}
    with RunDirectory(tmp_path / "run", RECIPE, environment=inputs) as run:
        path = run.path
    assert command_to_resume(path) == f"burnish.resume('{path}', reward=short)"
    said = command_to_resume(path, anyway=True, changes={"train.steps": 9})
    assert said.endswith("reward=short, anyway=True, overrides={'train.steps': 9})")


def test_an_error_is_recorded_once_and_everywhere(tmp_path):
    path = tmp_path / "run"
    with (
        pytest.raises(KeyError) as caught,
        failure.recorded(path, lambda: RunDirectory(path, RECIPE)) as attempt,
        attempt.open(),
    ):
        raise KeyError("lost")
    command = f"burnish resume {path}"
    remedy = f"{path}/log.txt has the traceback"
    assert caught.value.__notes__ == [remedy, f"{CORRECT}: {command}"]
    found = report.read_failure(path)
    assert found == Failure("KeyError", "KeyError: 'lost'", remedy, command, CORRECT)
    assert str(found).endswith(f"{CORRECT}: {command}")
    log = (path / "log.txt").read_text()
    assert f"{CORRECT}: {command}" in log
    assert "Traceback (most recent call last)" in log
    assert "the run failed: KeyError: KeyError: 'lost'" in log
    assert "lost" in (path / "report.html").read_text()


def test_a_run_that_fails_before_it_has_a_directory_gets_one(tmp_path):
    path = tmp_path / "run"
    with (
        pytest.raises(DataError) as caught,
        failure.recorded(path, lambda: RunDirectory(path, RECIPE)),
    ):
        raise DataError("no prompt fits")
    assert report.read_failure(path).message == "no prompt fits"
    condition = f"{CORRECT} (a changed recipe needs a new run)"
    assert caught.value.__notes__ == [f"{condition}: burnish resume {path}"]


def test_the_directory_of_another_run_is_left_alone(tmp_path):
    with RunDirectory(tmp_path, RECIPE):
        before = sorted(tmp_path.iterdir())
        with (
            pytest.raises(RunError, match="must be new or empty"),
            failure.recorded(tmp_path, lambda: RunDirectory(tmp_path, RECIPE)) as attempt,
        ):
            attempt.open()
        assert sorted(tmp_path.iterdir()) == before


def test_a_second_error_does_not_hide_the_first(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "status.json")

    for name in ("write_failure", "write_report"):
        monkeypatch.setattr(failure, name, broken)
    path = tmp_path / "run"

    class Parts:
        def close(self):
            raise RuntimeError("it can't be closed")

    with (
        pytest.raises(EngineError, match="the engine is gone") as caught,
        failure.recorded(path, lambda: RunDirectory(path, RECIPE)) as attempt,
        failure.closing_last(Parts()),
        attempt.open(),
    ):
        raise EngineError("the engine is gone")
    *problems, command = caught.value.__notes__
    assert [problem.partition(" ")[0] for problem in problems] == [
        f"{path}/status.json",
        f"{path}/report.html",
    ]
    assert command == f"continue with: burnish resume {path}"
    with pytest.raises(RuntimeError, match="can't be closed"), failure.closing_last(Parts()):
        pass


def test_a_status_is_overwritten_in_place_if_there_is_no_room(tmp_path, monkeypatch):
    (tmp_path / STATUS).write_text(json.dumps({"state": "running", "steps": 9}) + " " * 500)

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(report, "replace_file", full)
    given = Failure("disk full", "m", "r", "c")
    report.write_failure(tmp_path, given, now=1.0)
    assert report.read_failure(tmp_path) == given
    assert json.loads((tmp_path / STATUS).read_text())["steps"] == 9


def test_a_status_of_another_version_is_read(tmp_path):
    (tmp_path / STATUS).write_text('{"state": "failed", "error": {"message": "m", "x": 1}}')
    assert report.read_failure(tmp_path) == Failure("", "m", "", "")
    for text in ('{"state": "failed", "error": "m"}', '{"state": "fai', '{"state": "stopped"}'):
        (tmp_path / STATUS).write_text(text)
        assert report.read_failure(tmp_path) is None


def test_what_a_message_says_of_control_characters_is_escaped_in_the_log(tmp_path):
    path = tmp_path / "run"
    with (
        pytest.raises(DataError),
        failure.recorded(path, lambda: RunDirectory(path, RECIPE)),
    ):
        raise DataError("a\x1b[31mred " + "long " * 1000)
    assert "\x1b" not in (path / "log.txt").read_text()
    assert (path / "log.txt").read_text().count("long") == 1000
    assert len((path / STATUS).read_bytes()) < 4096
    assert tomllib.loads((path / "recipe.toml").read_text())["name"] == "sort"


def test_notes_survive_the_way_between_processes():
    error = DataError("x")
    error.add_note("continue with: c")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["continue with: c"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_files_that_fail_for_the_same_reason_are_named_once(number, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with RunDirectory(path, RECIPE):
        pass

    def refused(file, text):
        raise OSError(number, os.strerror(number), str(file))

    first = OSError(number, os.strerror(number), str(path / "status.json"))
    found = failure.explain(first, path, "c")
    for module in (directory, report):
        monkeypatch.setattr(module, "replace_file", refused)
    (said,) = failure.record_failure(path, found, first)
    assert said == f"{path}/report.html could not be written for the same reason"
    other = KeyError("x")
    said = failure.record_failure(path, failure.explain(other, path, "c"), other)
    assert [line.split()[0] for line in said] == [f"{path}/status.json", f"{path}/report.html"]


def test_a_report_or_a_note_that_can_not_be_written_has_a_remedy(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with RunDirectory(path, RECIPE):
        pass

    def refused(self, *given, **named):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "write_text", refused)
    for command, file in {("report",): "report.html", ("note", "a"): "note.json"}.items():
        result = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
        assert str(result.exception) == (
            f"can't write {path}/{file}: Read-only file system; make the directory and its files "
            f"writable, or copy {path} to a place that is"
        )
