"""Runs that fail in every phase: what they leave, and that they go on as if they had not."""

import errno
import json
import os
import pathlib
import resource
import shutil
import subprocess

import pytest

import burnish
from burnish import api
from burnish.cli import main
from burnish.errors import BurnishError, GraderError, RunError
from burnish.learner.learner import LocalLearner
from burnish.runs import checkpoints
from burnish.tasks.sorting import Sorting
from tests.conftest import aborted
from tests.loops.test_recorder import fingerprint, one_thread  # noqa: F401
from tests.runs.test_report import data_of

SORT = ["train.steps=4", "train.epochs=1", "checkpoint.every=2", "validation.every=3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return api.train("sort", overrides=SORT, out=tmp_path_factory.mktemp("whole") / "run")


def failing(function, after, error):
    """The function, which raises from its call number ``after`` + 1 on."""
    calls = []

    def limited(*given, **named):
        calls.append(1)
        if len(calls) > after:
            raise error
        return function(*given, **named)

    return limited


PLACES = {
    "building": (Sorting, "__init__", 0, None),
    "before step 1": (Sorting, "grade_all", 0, None),
    "step 1": (Sorting, "grade_all", 1, None),
    "step 3": (Sorting, "grade_all", 3, "step-00000002"),
    "validation": (Sorting, "grade_all", 4, "step-00000002"),
    "learning": (LocalLearner, "step", 2, "step-00000002"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [GraderError("the grader is gone"), ZeroDivisionError("oh")])
def test_a_run_records_why_it_failed_and_goes_on(place, error, whole, tmp_path, monkeypatch):
    owner, name, after, checkpoint = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), after, error))
        with pytest.raises(type(error)) as caught:
            api.train("sort", overrides=SORT, out=tmp_path / "run")
    path, run = tmp_path / "run", burnish.Run(tmp_path / "run")
    last = checkpoints.latest(path)
    assert (last and last.name) == checkpoint
    assert caught.value.__notes__[-1] == run.error.advice
    assert run.error.lead.startswith("correct the cause first, or the error returns; then continue")
    assert ("--anyway" in run.error.lead) == (last is not None and isinstance(error, GraderError))
    assert run.error.kind == type(error).__name__
    assert str(error) in run.error.message
    assert run.error.command == f"burnish resume {path}"
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["error"]) == ("failed", run.error._asdict())
    log = (path / "log.txt").read_text()
    assert run.error.advice in log
    assert ("Traceback" in log) == isinstance(error, ZeroDivisionError)
    state = data_of(path / "report.html")["state"]
    assert (state["kind"], state["error"]["message"]) == ("failed", run.error.message)
    api.resume(path)
    assert run.error is None
    assert "error" not in json.loads((path / "status.json").read_text())
    assert fingerprint(path) == fingerprint(whole)


def test_a_refused_resume_leaves_the_error_of_the_run(tmp_path, monkeypatch):
    error = GraderError("the grader is gone")
    with monkeypatch.context() as patch:
        patch.setattr(Sorting, "grade_all", failing(Sorting.grade_all, 3, error))
        with pytest.raises(GraderError):
            api.train("sort", overrides=SORT, out=tmp_path / "run")
        with pytest.raises(BurnishError, match="can't change when a run is resumed"):
            api.resume(tmp_path / "run", overrides="train.epochs=2")
    assert burnish.Run(tmp_path / "run").error.message == "the grader is gone"


def test_a_failed_resume_repeats_its_own_options(whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    (path / "summary.json").unlink()
    monkeypatch.setattr(Sorting, "__init__", failing(None, 0, MemoryError()))
    with pytest.raises(RunError, match="there is not enough memory") as caught:
        api.resume(path, overrides="train.steps=6", from_checkpoint="step-00000002", anyway=True)
    options = "--from step-00000002 --anyway --set train.steps=6"
    assert caught.value.__notes__[-1] == f"continue with: burnish resume {path} {options}"
    assert (path / "log.txt").read_bytes() == (whole / "log.txt").read_bytes()


def test_a_finished_run_that_can_not_be_extended_is_still_finished(whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    before = fingerprint(path)
    monkeypatch.setattr(Sorting, "__init__", failing(None, 0, GraderError("no")))
    with pytest.raises(GraderError):
        api.resume(path, overrides="train.steps=6")
    assert burnish.Run(path).error is None
    assert fingerprint(path) == before


def test_a_run_without_a_checkpoint_begins_again_whatever_has_changed(whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Sorting, "grade_all", failing(Sorting.grade_all, 1, GraderError("no")))
        with pytest.raises(GraderError):
            api.train("sort", overrides=SORT, out=path)
    kept = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps(kept | {"processor": "another"}))
    api.resume(path)
    assert fingerprint(path) == fingerprint(whole)


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a disk of 250 kB."""
    place = tmp_path / "small disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=250k", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


LONG = ["train.steps=40", "train.epochs=1", "checkpoint.every=5", "checkpoint.keep=1"]


# TensorBoard writes its file in a thread, which ends with an exception of its own.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_said_and_the_run_goes_on_with_more_room(small_disk, tmp_path):
    path = small_disk / "run"
    with pytest.raises(RunError, match=r"[nN]o space left") as caught:
        api.train("sort", overrides=LONG, out=path)
    assert str(path) in str(caught.value)
    assert "free" in str(caught.value)
    assert caught.value.__notes__[-1] == f"continue with: burnish resume '{path}'"
    assert "Errno" not in "".join([str(caught.value), *caught.value.__notes__])
    assert burnish.Run(path).error.kind == "disk full"
    subprocess.run(["mount", "-o", "remount,size=9m", "none", str(small_disk)], check=True)
    api.resume(path)
    assert burnish.Run(path).error is None
    whole = api.train("sort", overrides=LONG, out=tmp_path / "whole")
    assert fingerprint(path) == fingerprint(whole)


def test_a_file_that_may_not_grow_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"jsonl: the file is larger than the limit.*ulimit -f"):
            api.train("sort", overrides=LONG, out=tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert burnish.Run(tmp_path / "run").error.kind == "disk full"


def test_a_directory_that_becomes_read_only_is_told_by_the_exception(tmp_path, monkeypatch):
    path, real = tmp_path / "run", pathlib.Path.open
    rows = []

    def refused(self, mode="r", *given, **named):
        rows.append(self.name == "metrics.jsonl")
        if sum(rows) > 3 and self.is_relative_to(path) and mode[0] in "wax":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return real(self, mode, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", refused)
        with pytest.raises(RunError, match=r"can't write .*: Read-only file system") as caught:
            api.train("sort", overrides=SORT, out=path)
    problem, command = caught.value.__notes__
    assert command == f"continue with: burnish resume {path}"
    assert problem.startswith(f"{path}/log.txt and {path}/report.html could not be written for")
    api.resume(path)


def test_a_directory_that_has_no_room_for_a_run_can_be_used_again(tmp_path, monkeypatch):
    from burnish.runs import directory

    real = directory.replace_file

    def full(path, text):
        if path.name == "recipe.toml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "replace_file", full)
        with pytest.raises(RunError, match=r"can't write .*recipe.toml: no space left") as caught:
            api.train("sort", overrides=SORT, out=tmp_path / "run")
    assert caught.value.__notes__ == ["then repeat the command"]
    api.train("sort", overrides=["train.steps=1"], out=tmp_path / "run")


def test_a_directory_of_a_run_that_learned_nothing_can_be_used_again(tmp_path, monkeypatch):
    path = tmp_path / "run"
    for after in (0, 1):  # before step 1, and in step 1
        with monkeypatch.context() as patch:
            patch.setattr(
                Sorting, "grade_all", failing(Sorting.grade_all, after, GraderError("no"))
            )
            with pytest.raises(GraderError):
                api.train("sort", overrides=SORT, out=path)
    (path / "mine.txt").touch()
    with pytest.raises(RunError, match="must be new or empty, but it contains"):
        api.train("sort", overrides=SORT, out=path)
    (path / "mine.txt").unlink()
    run = api.train("sort", overrides=["train.steps=1", "seed=1"], out=path)
    assert (run.recipe.seed, len(run.metrics), run.error) == (1, 2, None)
    monkeypatch.setattr(Sorting, "grade_all", failing(Sorting.grade_all, 2, GraderError("no")))
    with pytest.raises(GraderError):  # it failed in step 2 and has learned something
        api.train("sort", overrides=SORT, out=tmp_path / "other")
    with pytest.raises(RunError, match="must be new or empty, but it contains"):
        api.train("sort", overrides=SORT, out=tmp_path / "other")


def test_a_bound_on_errors_may_be_raised_to_go_on(tmp_path, monkeypatch):
    """The remedy of the error that too many grades are errors."""
    from burnish.engine.sorter import SorterEngine

    real = SorterEngine.step
    with monkeypatch.context() as patch:
        patch.setattr(SorterEngine, "step", lambda self: list(map(aborted, real(self))))
        with pytest.raises(GraderError, match=r"raise rollout\.max_errors"):
            api.train("sort", overrides=SORT, out=tmp_path / "run")
        run = api.resume(tmp_path / "run", overrides=["rollout.max_errors=1"])
    assert run.metrics[-1]["step"] == 4


def test_python_displays_warnings_and_the_command_line_prints_them(tmp_path, capfd, monkeypatch):
    overrides = ["train.steps=2", "train.learning_rate=1e-9"]
    run = api.train("sort", overrides=overrides, out=tmp_path / "run")
    (warning,) = run.warnings
    assert warning.startswith("The reward did not move measurably")
    assert run.summary["warnings"] == [warning]
    assert f"warning: {warning}" in capfd.readouterr().err
    main._show_end(run.path)
    assert f"warning: {warning}" in capfd.readouterr().out
    api.train("sort", overrides=overrides, out=tmp_path / "quiet", show=False)
    assert "warning" not in capfd.readouterr().err


def test_the_command_line_says_how_to_go_on(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Sorting, "grade_all", failing(Sorting.grade_all, 1, GraderError("no")))
    monkeypatch.setattr("sys.argv", ["burnish", "train", "sort", "--quiet", "--out", "my run"])
    with pytest.raises(SystemExit):
        main.main()
    said = capfd.readouterr().err
    lead = "correct the cause first, or the error returns; then continue with"
    assert said.endswith(f"error: no\n{lead}: burnish resume 'my run'\n")
