"""Functions of a script that a run calls."""

import json

import numpy as np
import pytest

from burnish import api
from burnish.errors import CallbackError
from burnish.loops.callbacks import Callbacks, CheckpointRecord, StepRecord
from burnish.runs import checkpoints
from tests.loops.test_recorder import LAGGED, SORT, fingerprint, one_thread  # noqa: F401


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("callbacks") / "whole"
    return api.train("sort", overrides=SORT, out=path, show=False)


@pytest.mark.parametrize("more", [[], LAGGED], ids=["sync", "lagged"])
def test_callbacks_get_what_is_written_and_change_nothing(more, tmp_path):
    whole = api.train("sort", overrides=[*SORT, *more], out=tmp_path / "whole", show=False)
    seen, written = [], []

    def note(record):
        seen.append(record)
        rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        written.append(json.loads(rows[-1])["step"])

    run = api.train(
        "sort", overrides=[*SORT, *more], out=tmp_path / "run", show=False,
        on_step=note, on_validation=note, on_checkpoint=note,
    )  # fmt: skip
    assert fingerprint(run) == fingerprint(whole)
    order = [(type(record).__name__[:-6], record.step) for record in seen]
    assert order == [
        ("Validation", 0), ("Step", 1), ("Step", 2), ("Checkpoint", 2), ("Validation", 3),
        ("Step", 3), ("Step", 4), ("Checkpoint", 4), ("Step", 5), ("Validation", 6), ("Step", 6),
        ("Checkpoint", 6),
    ]  # fmt: skip
    assert written == [record.step for record in seen]  # the record's step is on the disk
    steps = [record for record in seen if isinstance(record, StepRecord)]
    assert [{"step": s.step} | s.metrics for s in steps] == run.metrics[1:]
    assert [{"step": s.step} | s.timings for s in steps] == run.timings[1:]
    rewards = [g.reward for group in steps[0].groups for g in group.grades]
    assert np.mean(rewards) == pytest.approx(run.metrics[1]["rollout/reward"])
    saved = [record for record in seen if isinstance(record, CheckpointRecord)]
    assert [(one.path, one.score) for one in saved[-2:]] == [
        (one.path, one.score) for one in run.checkpoints[-2:]
    ]


@pytest.mark.parametrize(
    ("name", "last"), [("on_step", 3), ("on_validation", 3), ("on_checkpoint", 4)]
)
def test_a_callback_that_returns_true_stops_the_run_with_a_checkpoint(name, last, whole, tmp_path):
    stop = {name: lambda record: np.bool_(record.step >= 3)}
    run = api.train("sort", overrides=SORT, out=tmp_path / "run", show=False, **stop)
    assert run.metrics[-1]["step"] == last
    assert checkpoints.step_of(checkpoints.latest(run.path)) == last
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    seen = []
    api.resume(run, show=False, on_step=seen.append)
    assert [record.step for record in seen] == list(range(last + 1, 7))
    assert fingerprint(run) == fingerprint(whole)


def test_the_validation_before_the_first_step_can_stop_the_run(whole, tmp_path):
    out = tmp_path / "run"
    run = api.train("sort", overrides=SORT, out=out, show=False, on_validation=lambda record: True)
    assert [row["step"] for row in run.metrics] == [0]
    api.resume(run, show=False)
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.parametrize("name", ["on_step", "on_validation", "on_checkpoint"])
def test_an_error_in_a_callback_fails_the_run_with_a_checkpoint(name, whole, tmp_path):

    def fail(record):
        if record.step >= 3:
            raise KeyError("mine")

    last = 4 if name == "on_checkpoint" else 3
    with pytest.raises(
        CallbackError, match=f"{name} raised KeyError at step {last}: 'mine'"
    ) as told:
        api.train("sort", overrides=SORT, out=tmp_path / "run", show=False, **{name: fail})
    assert isinstance(told.value.__cause__, KeyError)
    run = api.Run(tmp_path / "run")
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert checkpoints.step_of(checkpoints.latest(run.path)) == last
    api.resume(run, show=False)
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.parametrize("returned", [None, 1, "True", 0.0, False, [True]])
def test_only_true_stops(returned):
    record = StepRecord(1, {}, {}, ())
    assert not Callbacks(on_step=lambda _: returned).ask_to_stop(record)
    assert not Callbacks().ask_to_stop(record)
