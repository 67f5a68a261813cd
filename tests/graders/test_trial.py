"""Rewards that fail are found before a run, each with its own message."""

import threading
import time

import pytest

from burnish.console.progress import showing
from burnish.errors import DataError, GraderError
from burnish.graders.pool import GraderLimits
from burnish.graders.trial import SENTENCE, made_up_responses, try_reward

LIMITS = GraderLimits(cpu_seconds=0.3, wall_seconds=1.0, memory_bytes=1 << 28)
ROW = {"prompt": "Name a fruit.", "answer": "apple"}
CODE = """
import os, time

def score(response, row):
    {body}
"""


def write(tmp_path, body, name="reward.py"):
    file = tmp_path / name
    file.write_text(CODE.format(body=body))
    return f"{file}:score"


@pytest.mark.parametrize(
    ("body", "message", "remedy"),
    [
        ("time.sleep(60)", "took more than 1 s (task.wall_seconds)", "raise task.wall_seconds"),
        ("\n    while True: pass", "took more than 0.3 s of CPU time", "raise task.cpu_seconds"),
        ("return len(bytearray(10 << 30))", "256 MB of memory", "raise task.memory_mb"),
        ("os._exit(4)", "the worker exited with 4", "remove the call that ends"),
        ("return 'good'", "must be one finite number, got str 'good'", "return one finite number"),
        ("return float('nan')", "one finite number, got float nan", "return one finite number"),
        ("return float('inf')", "one finite number, got float inf", "return one finite number"),
        (
            "return [10.0]",
            "one finite number, got list [10.0]; a reward takes one response and its row",
            "mark it with @burnish.batched",
        ),
        ("pass", "one finite number, got NoneType None", "return one finite number"),
        ("return {'score': 1}", "dict has no 'reward', only score", "return one finite number"),
        (
            "return row['gold']",
            "KeyError: 'gold' (reward.py, line 5)",
            "correct it; for a response",
        ),
    ],
)
def test_each_failure_has_a_message_with_its_remedy(tmp_path, body, message, remedy):
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        try_reward(write(tmp_path, body), LIMITS, ROW, 0.1)
    assert time.monotonic() - began < 15
    said = str(caught.value)
    assert "reward.py:score fails: " in said
    assert message in said
    assert remedy in said
    assert f"made-up response {SENTENCE!r} and the first row, {{'answer': 'apple'" in said
    assert said.endswith("rollout.max_errors = 1 makes this a note")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import nothing_of_that_name\ndef score(r, row): return 1\n",
            r"No module named 'nothing_of_that_name' \(line 1\); install",
        ),
        (
            "x = 1\ny = x / 0\ndef score(r, row): return 1\n",
            r"ZeroDivisionError.*\(line 2\); correct",
        ),
        ("async def score(response, row):\n    yield 1.0\n", "an async generator because"),
        ("def score(response): return 1\n", "must take two arguments, response and row"),
    ],
)
def test_a_file_that_can_not_be_used_is_an_error_also_if_errors_are_accepted(
    tmp_path, text, message
):
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(DataError, match=message):
        try_reward(f"{tmp_path}/reward.py:score", LIMITS, ROW, 1.0)


def test_an_import_counts_against_the_time_to_start(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import time\ntime.sleep(1.5)\ndef score(r, row): return 1\n"
    )
    try_reward(f"{tmp_path}/reward.py:score", LIMITS, ROW, 0.1)
    late = GraderLimits(start_seconds=0.5)
    with pytest.raises(GraderError, match=r"took more than 0.5 s \(to load it\)"):
        try_reward(f"{tmp_path}/reward.py:score", late, ROW, 0.1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return float(response)", ["note"]),  # raises for a sentence, and reads a number
        ("return len(response.split('<answer>')[1])", ["note"]),  # raises without tags
        ("return float(row['answer'] in response)", []),
    ],
)
def test_a_reward_that_reads_another_format_passes_with_a_note(tmp_path, body, says):
    told = []
    with showing(told.append):
        try_reward(write(tmp_path, body), LIMITS, ROW | {"answer": "7"}, 0.1)
    assert [p.phase for p in told if p.phase != "check"] == says
    assert f"checking the reward {tmp_path}/reward.py:score" in [p.doing for p in told]
    assert made_up_responses({"prompt": "x"})[-1] == "42"


def test_a_failure_is_a_note_if_all_errors_are_accepted(tmp_path):
    told = []
    with showing(told.append):
        try_reward(write(tmp_path, "return 1 / 0"), LIMITS, ROW, 1.0)
    assert "note: reward" in told[-1].doing
    assert "ZeroDivisionError" in told[-1].doing


def test_built_in_rewards_are_not_called():
    try_reward("inclusion", LIMITS, ROW, 0.0)  # the row has no keywords


@pytest.mark.parametrize("is_main", [True, False])
def test_a_closure_that_hangs_is_named_within_its_limit(is_main):
    """In another thread it can't be interrupted: it is left behind."""
    errors = []

    def attempt():
        try:
            try_reward(lambda response, row: time.sleep(8), LIMITS, ROW, 0.1)
        except DataError as error:
            errors.append(str(error))

    began = time.monotonic()
    thread = threading.Thread(target=attempt)
    if is_main:
        attempt()
    else:
        thread.start()
        thread.join()
    assert time.monotonic() - began < 5
    assert "reward <lambda> fails: took more than 1 s (task.wall_seconds)" in errors[0]
    assert "it runs in this process" in errors[0]
