"""A follower's reading of a run's directory, with a tracker that keeps what it gets."""

import json

import pytest

from burnish.console.progress import Progress
from burnish.runs.directory import RunDirectory
from burnish.runs.report import write_status
from burnish.runs.trackers.follower import Follower, FollowerSettings

RECIPE = '[train]\nsteps = 9\n[task]\nname = "sort"\n'


class Kept:
    """Keeps the calls of a follower."""

    def __init__(self):
        self.calls = []

    def start(self, run, kept):
        self.calls.append(("start", run, kept))
        return kept or "id-1"

    def log(self, step, values, tables):
        self.calls.append(("log", step, values, tables))

    def finish(self, state, files):
        self.calls.append(("finish", state, [file.name for file in files]))

    @property
    def steps(self):
        return [call[1] for call in self.calls if call[0] == "log"]


def response(step, sample, asked="a question"):
    return {
        "step": step, "sample": sample, "asked": asked, "response": f"answer {sample}",
        "reward": 0.5, "correct": None, "advantage": None, "status": "scored", "finish": "stop",
        "tokens": [1, 2, 3],
    }  # fmt: skip


def write(run, step, *, validated=False):
    """What the recorder writes in a step, in its order."""
    metrics = {"rollout/reward": step / 10}
    if validated:
        metrics |= {"validation/reward": step / 20}
        for sample in range(3):
            run.append_row("evaluations.jsonl", response(step, sample, "held out"))
    for sample in range(3):
        run.append_row("rollouts.jsonl", response(step, sample))
    run.append_row("metrics.jsonl", {"step": step} | metrics)
    run.append_row("timings.jsonl", {"step": step, "time/step": 1.0})


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path / "run", RECIPE, environment={"threads": 2}) as opened:
        (tmp_path / "run" / "trackers").mkdir()
        yield opened


def follower(run, tracker, samples=2):
    return Follower(FollowerSettings("kept", str(run.path), "p", "g", samples), tracker)


def test_steps_are_sent_once_with_bounded_tables_of_validated_steps(run):
    tracker = Kept()
    followed = follower(run, tracker)
    ((_, facts, kept),) = tracker.calls
    assert (facts.project, facts.group, kept) == ("p", "g", None)
    assert facts.recipe["train"] == {"steps": 9}
    assert facts.environment == {"threads": 2}
    write(run, 1)
    write(run, 2, validated=True)
    followed.send()
    followed.send()
    (one, two) = tracker.calls[1:]
    assert one == ("log", 1, {"rollout/reward": 0.1, "time/step": 1.0}, {})
    assert two[2] == {"rollout/reward": 0.2, "validation/reward": 0.1, "time/step": 1.0}
    tables = two[3]
    assert [(row["step"], row["response"]) for row in tables["rollouts"]] == [
        (2, "answer 0"), (2, "answer 1"),
    ]  # fmt: skip
    assert [row["prompt"] for row in tables["validation"]] == ["held out"] * 2
    assert "tokens" not in tables["rollouts"][0]
    assert json.loads((run.path / "trackers/kept.json").read_text()) == {"id": "id-1", "logged": 2}


def test_no_tables_without_samples(run):
    tracker = Kept()
    followed = follower(run, tracker, samples=0)
    write(run, 1, validated=True)
    followed.send()
    assert tracker.calls[1][3] == {}


def test_a_row_that_is_being_written_is_sent_when_it_is_complete(run):
    tracker = Kept()
    followed = follower(run, tracker)
    write(run, 1)
    run.append("metrics.jsonl", '{"step": 2, "rollout')
    followed.send()
    assert tracker.steps == [1]
    run.append("metrics.jsonl", '/reward": 0.2}\n')
    followed.send()
    assert tracker.steps == [1]  # its timings are not written yet
    run.append_row("timings.jsonl", {"step": 2})
    followed.send()
    assert tracker.calls[-1] == ("log", 2, {"rollout/reward": 0.2}, {})


def test_steps_that_were_cut_back_are_not_sent_again(run):
    """By the same process, which went back to a checkpoint, and by the process of a resumed run."""
    tracker = Kept()
    followed = follower(run, tracker)
    for step in (1, 2):
        write(run, step)
    positions = run.positions()
    for step in (3, 4):
        write(run, step, validated=True)
    followed.send()
    run.cut_back(positions)
    run.restart(2)
    for step in (3, 4, 5, 6):
        write(run, step, validated=step == 5)
    followed.send()
    assert tracker.steps == [1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in tracker.calls[5][3]["rollouts"]} == {5}
    run.cut_back(positions)
    run.restart(2)
    resumed = Kept()
    later = follower(run, resumed)
    assert resumed.calls[0][2] == "id-1"
    for step in range(3, 9):
        write(run, step)
    later.send()
    assert resumed.steps == [7, 8]


def test_a_tracker_that_missed_steps_gets_them_when_the_run_is_resumed(run):
    """Also a tracker that the run did not have before."""
    for step in range(4):
        write(run, step, validated=step == 2)
    tracker = Kept()
    followed = follower(run, tracker)
    followed.send()
    assert tracker.steps == [0, 1, 2, 3]
    assert len(tracker.calls[3][3]["rollouts"]) == 2


@pytest.mark.parametrize(
    ("status", "state"), [("finished", "finished"), ("stopped", "stopped"), ("running", "crashed")]
)
def test_the_end_sends_the_last_steps_the_files_and_the_state(status, state, run):
    tracker = Kept()
    followed = follower(run, tracker)
    write(run, 1)
    run.write("report.html", "<html>")
    write_status(run.path, status, Progress("step", ""), now=0.0)
    followed.finish()
    assert tracker.steps == [1]
    assert tracker.calls[-1] == (
        "finish",
        state,
        ["report.html", "recipe.toml", "environment.json"],
    )
