import pytest

from burnish.progress import Progress
from burnish.runs import report

NOW = 1_000_000.0
SAMPLING = Progress(
    "generate",
    "sampling 64 responses",
    done=1234,
    total=4096,
    unit="tokens",
    tokens_per_second=210.4,
    step=3,
    steps=14,
    seconds_left=512.0,
)


def write(run, state="running", progress=SAMPLING, *, age=2.0):
    report.write_status(run, state, progress, now=NOW - age)


def test_a_status_in_words(tmp_path):
    write(tmp_path)
    assert report.standing(tmp_path, 2, 14, now=NOW) == {
        "kind": "running",
        "text": "running, 2 of 14 steps",
        "doing": "generate: sampling 64 responses, 1,234 of 4,096 tokens, 210 tokens per second, "
        "about 9 minutes left",
        "share": pytest.approx(0.3013, abs=1e-4),
    }
    write(tmp_path, progress=Progress("learn", ""))
    told = report.standing(tmp_path, 1, None, now=NOW)
    assert (told["text"], told["doing"], told["share"]) == ("running, 1 step", "learn", None)


def test_a_run_that_says_nothing_for_a_minute_is_not_called_running(tmp_path):
    write(tmp_path, age=59)
    assert report.standing(tmp_path, 2, 14, now=NOW)["kind"] == "running"
    write(tmp_path, age=180)
    told = report.standing(tmp_path, 2, 14, now=NOW)
    assert told["text"] == "no sign of life for 3 minutes, 2 of 14 steps"
    assert (told["kind"], told["doing"], told["share"]) == ("silent", "", None)
    (tmp_path / "summary.json").write_text("{}")
    assert report.standing(tmp_path, 2, 14, now=NOW)["text"] == "finished, 2 of 14 steps"


def test_the_steps_of_a_supervised_run_are_those_it_says(tmp_path):
    assert report.standing(tmp_path, 2, None, now=NOW)["text"] == "stopped early, 2 steps"
    write(tmp_path)
    assert report.standing(tmp_path, 2, None, now=NOW)["text"] == "running, 2 of 14 steps"
    assert report.standing(tmp_path, 2, 20, now=NOW)["text"] == "running, 2 of 20 steps"


def test_how_a_run_ended(tmp_path):
    for state, text in (("failed", "failed"), ("stopped", "stopped early")):
        write(tmp_path, state)
        told = report.standing(tmp_path, 2, 14, now=NOW)
        assert (told["kind"], told["text"]) == ("stopped", f"{text}, 2 of 14 steps")
