import json
from itertools import combinations

import numpy as np
import pytest

from burnish.runs.directory import to_jsonl
from burnish.runs.results import (
    Z,
    accuracy,
    estimate_pass_at_k,
    interval,
    majority,
    wilson,
    write_evaluation,
)
from tests.runs.test_report import EPISODES, rollout


def test_an_evaluation_shows_prompts_as_they_were_asked_and_whole(tmp_path):
    asked = ["How much is <b>2</b> + 2?", "Read this first. " * 500 + "The very end."]
    rows = [rollout(0, k, prompt=f"<|user|>{text}<|end|>") for k, text in enumerate(asked)]
    rows = [row | {"asked": text} for row, text in zip(rows, asked, strict=True)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("settings.json", "figures.json"):
        (tmp_path / name).write_text("{}")
    page = write_evaluation([tmp_path], tmp_path / "report.html").read_text()
    assert "How much is &lt;b&gt;2&lt;/b&gt; + 2?" in page
    assert f"<pre>{asked[1]}</pre></details>" in page
    assert "|user|" not in page.replace("prompt_id", "").split("<article")[1].split("</p>")[1]


def test_an_evaluation_shows_episodes_as_conversations(tmp_path):
    rows = [row | {"sample": k} for k, row in enumerate(EPISODES.values())]
    (tmp_path / "results.jsonl").write_text(to_jsonl(rows))
    for name in ("settings.json", "figures.json"):
        (tmp_path / name).write_text("{}")
    page = write_evaluation([tmp_path], tmp_path / "report.html").read_text()
    assert page.index("turn 1, reward -0.1") < page.index(">lower<") < page.index("turn 2, reward")
    assert "truncated after 2 turns" in page
    assert "did not start:</b> reset took more than 20 s" in page
    assert "failed:</b> step raised &lt;b&gt;\\x1b[31mRuntimeError" in page
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "truncated here: 4,000 of 500,000 characters" in page
    assert "4800 further turns not shown" in page


def row(right, answer):
    return {"reward": float(right), "parts": {}, "answer": answer}


@pytest.mark.parametrize(("right", "samples"), [(0, 4), (1, 4), (3, 7), (7, 7), (2, 2)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(right, samples):
    marks = [i < right for i in range(samples)]
    for k in range(1, samples + 1):
        choices = [any(choice) for choice in combinations(marks, k)]
        assert estimate_pass_at_k(right, samples, k) == pytest.approx(np.mean(choices))


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (5, 5), (27, 1319), (3, 7), (50, 100)])
def test_wilson_holds_the_shares_that_the_score_test_accepts(successes, trials):
    low, high = wilson(successes, trials)
    grid = np.linspace(0, 1, 200_001)[1:-1]
    score = np.abs(successes / trials - grid) / np.sqrt(grid * (1 - grid) / trials)
    accepted = grid[score <= Z]
    assert low == pytest.approx(accepted.min(), abs=1e-5)
    assert high == pytest.approx(accepted.max(), abs=1e-5)


def test_samples_count_as_far_as_they_are_not_the_prompts():
    agreeing = [1.0] * 30 + [0.0] * 70  # four samples that always agree tell no more than one
    assert interval(agreeing, 4) == wilson(30, 100)
    assert interval([0.3] * 100, 10) == pytest.approx(wilson(300, 1000))
    assert interval([0.0] * 10, 4) == wilson(0, 10)
    low, high = interval([0.5, 0.25, 0.75, 0.0] * 25, 4)
    assert wilson(37.5, 100)[0] < low < wilson(150, 400)[0] + 1e-9
    assert wilson(150, 400)[1] - 1e-9 < high < wilson(37.5, 100)[1]


def test_the_interval_holds_the_truth_19_times_in_20():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        chances = random.beta(0.4, 1.2, size=200)  # of a population whose mean is 0.25
        shares = random.binomial(8, chances) / 8
        low, high = interval(shares.tolist(), 8)
        held += low <= 0.25 <= high
    assert 0.93 < held / 1000 < 0.97


def test_majority():
    def vote(*answers):
        return majority([row(a == "7", a) for a in answers])

    assert vote("7", "7", "3")
    assert not vote("3", "3", "7")
    assert vote("7", "3")  # of equals, the first
    assert not vote("3", "7")
    assert vote(None, None, "7")
    assert not vote(None)
    assert majority([row(False, ""), row(False, "")]) is False


def test_figures():
    rows = [
        [row(True, "1"), row(False, "2"), row(False, "2")],
        [row(True, "1"), row(True, "1"), row(False, "2")],
    ]
    found = accuracy(rows)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["pass_at_2"] == pytest.approx((2 / 3 + 1) / 2)
    assert (found["pass_at_3"], found["majority_at_2"], found["majority_at_3"]) == (1, 1, 0.5)
    assert found.keys() == {"accuracy", "accuracy_low", "accuracy_high"} | {
        f"{name}_at_{k}" for name in ("pass", "majority") for k in (2, 3)
    }
    assert accuracy([]) == {}
    assert accuracy([[row(True, "x")]]).keys() == {"accuracy", "accuracy_low", "accuracy_high"}
