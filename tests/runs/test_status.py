import json

import pytest

from burnish.runs import status
from burnish.runs.report import chip, state_of, total_steps

NOW = 1_000_000.0
WHOLE = {
    "state": "running",
    "phase": "generate",
    "doing": "sampling 64 responses",
    "done": 1234,
    "total": 4096,
    "unit": "tokens",
    "step": 3,
    "steps": 14,
    "tokens_per_second": 210.4,
    "seconds_left": 512.0,
    "started": NOW - 90,
    "updated": NOW - 2,
    "pid": 1234,
}


def write(run, found):
    (run / status.FILE).write_text(json.dumps(found))


def test_a_status_in_words(tmp_path):
    write(tmp_path, WHOLE)
    told = status.read(tmp_path)
    assert told.model_dump() == WHOLE
    assert told.sentence() == (
        "generate: sampling 64 responses, 1,234 of 4,096 tokens, 210 tokens per second"
    )
    assert told.left() == "about 9 minutes left"
    assert told.share == pytest.approx(0.3013, abs=1e-4)
    assert chip(tmp_path, 2, 14, now=NOW) == {"kind": "running", "text": "running, 2 of 14 steps"}


def test_a_run_that_says_nothing_for_a_minute_is_not_called_running(tmp_path):
    write(tmp_path, WHOLE | {"updated": NOW - 59})
    assert state_of(tmp_path, now=NOW) == ("running", "running")
    write(tmp_path, WHOLE | {"updated": NOW - 180})
    assert chip(tmp_path, 2, 14, now=NOW) == {
        "kind": "silent",
        "text": "no sign of life for 3 minutes, 2 of 14 steps",
    }
    (tmp_path / "summary.json").write_text("{}")
    assert state_of(tmp_path, now=NOW) == ("finished", "finished")


def test_the_steps_of_a_supervised_run_are_those_it_says(tmp_path):
    assert total_steps(tmp_path, {"train": {}}) is None
    write(tmp_path, WHOLE)
    assert total_steps(tmp_path, {"train": {}}) == 14
    assert total_steps(tmp_path, {"train": {"steps": 20}}) == 20


def test_how_a_run_ended(tmp_path):
    for state, text in (("failed", "failed"), ("stopped", "stopped early")):
        write(tmp_path, WHOLE | {"state": state, "updated": 0})
        assert state_of(tmp_path, now=NOW) == ("stopped", text)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"state": "running", "updated": "never"}',
        b'{"done": 3}',
    ],
)
def test_what_cannot_be_read_is_no_status(tmp_path, damaged):
    assert status.read(tmp_path) is None
    (tmp_path / status.FILE).write_bytes(damaged)
    assert status.read(tmp_path) is None


def test_what_a_run_did_not_say_is_left_out(tmp_path):
    write(tmp_path, {"state": "running", "updated": 5.0})
    told = status.read(tmp_path)
    assert (told.sentence(), told.left(), told.share) == ("", "", None)
    some = {"done": 3, "total": 0, "seconds_left": -1, "phase": "learn"}
    write(tmp_path, {"state": "running", "updated": 5.0} | some)
    told = status.read(tmp_path)
    assert (told.sentence(), told.left(), told.share) == ("learn, 3 of 0", "", None)
