import pytest

from burnish.runs.drift import read_drift, read_mismatch


def line(values, first=0):
    return [(first + step, value) for step, value in enumerate(values)]


def saturating(n, full, pace):
    return [full * (1 - 2 ** (-step / pace)) for step in range(n)]


def test_reward_that_follows_kl():
    growth, company = read_drift(
        line([0.1 + 0.02 * s for s in range(40)]),
        line([-1.4e-7, *(0.01 * s for s in range(1, 40))]),  # rounding is no KL
    )
    assert growth == (
        "KL to the initial model, averaged over neighbouring steps, went from 0 to 0.39 "
        "nats per token by step 39."
    )
    assert company == ("The reward followed, from 0.1 to 0.86 by step 38, and ended at 0.88.")


def test_kl_that_runs_away_once_the_reward_is_made():
    reward = line(saturating(60, 0.9, 4))
    kl = line([0.02 * s if s < 30 else 0.6 + 0.1 * (s - 30) for s in range(60)])
    growth, company, runaway = read_drift(reward, kl)
    assert growth.endswith("by step 59.")
    assert company.startswith("The reward followed, from ")
    assert runaway == (
        "From step 18 on KL ran away: 0.36 to 3.5 nats per token by step 59, "
        "while the reward went from 0.86 to 0.9."
    )


@pytest.mark.parametrize(
    ("reward", "kl", "expected"),
    [
        ([0.5] * 20, [0.1 * s for s in range(20)], "did not follow: 0.5 at first, 0.5 at last"),
        (
            [1 - 0.05 * s for s in range(20)],
            [0.1 * s for s in range(20)],
            "not follow: 1 at",
        ),
        ([0.2] * 20, [1e-5 * s for s in range(20)], "the policy hardly moved"),
        ([0.1 * s for s in range(20)], [0.3] * 20, "from 0.3 to 0.3 nats"),
        (
            [0.1] * 9,
            [0, 1, 2, 3, 4, 3, 2, 1, 1],
            "at step 4 and fell back to 1.",
        ),
        ([0, 1, 2, 3, 4, 4, 2, 1, 0], [0, 1, 2, 3, 4, 4, 4, 4, 4], "ended at 0."),
    ],
)
def test_what_else_may_happen(reward, kl, expected):
    assert expected in " ".join(read_drift(line(reward), line(kl)))


def test_a_validation_measured_now_and_then_is_read_at_kls_steps():
    kl = line([0.01 * s for s in range(41)])
    text = " ".join(read_drift([(0, 0.1), (20, 0.5), (40, 0.9)], kl))
    assert "The reward followed, from 0.1 to 0.86 by step 38" in text


def test_nothing_is_read_from_nothing():
    assert read_drift(line([1, 2, 3]), []) == []
    assert read_drift([], line([0, 1])) == ["Too few steps have been measured to read a trend."]
    assert read_mismatch([], []) == []


def test_mismatch():
    assert read_mismatch(line([0, 0]), line([0, 0])) == [
        "Sampler and learner agree to the last bit of every log-probability."
    ]
    assert read_mismatch(line([1e-7, 3e-7]), line([1e-5, 4e-5])) == [
        "Sampler and learner agree: their log-probabilities differ by 2e-07 nats on average "
        "and by 4e-05 at most (step 1)."
    ]
    largest = line([1])
    for average, rounded, verdict in [
        (0.2, False, "disagree"),
        (0.2, True, "disagree"),
        (0.04, False, "disagree"),
        (0.04, True, "agree"),
    ]:
        (text,) = read_mismatch(line([average]), largest, rounded=rounded)
        assert text.startswith(f"Sampler and learner {verdict}: ")


def test_no_zero_is_negative():
    assert "-0 " not in " ".join(read_drift(line([-0.0] * 9), line([0.1 * s for s in range(9)])))
    assert "by 0 nats" in read_mismatch(line([-1e-12]), line([1]))[0]
