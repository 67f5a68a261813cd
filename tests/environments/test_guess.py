"""The game of the recipe ``guess``."""

from itertools import islice

from burnish.cli.data import make_guess
from burnish.environments.guess import ASK, COST, NUMBERS, Guess, random_games
from burnish.environments.protocol import read_observation


def played(secret, *guesses):
    game = Guess()
    assert game.reset({"secret": secret}, 0) == ASK
    steps = [game.step({"role": "assistant", "content": guess}) for guess in guesses]
    return [read_observation(step, "step") for step in steps]


def test_hints_costs_and_the_end():
    found = played(40, "32", " 50\n", "40")
    assert [one.messages[0]["content"] for one in found] == ["higher", "lower", "yes"]
    assert [one.done for one in found] == [False, False, True]
    assert [one.reward for one in found] == [-COST, -COST, 1 - COST]
    assert found[-1].metrics == {"guesses": 3, "correct": 1.0}


def test_a_malformed_guess_is_asked_again_and_costs_as_much():
    for text in ("", "64", "-1", "1.5", "x", "\u0665", "007"):
        (found,) = played(0, text)
        assert (found.messages[0]["content"], found.reward, found.done) == (ASK, -COST, False)


def test_the_seed_draws_the_number():
    def secret(seed):
        game = Guess()
        game.reset({}, seed)
        return game._secret

    assert secret(3) == secret(3)
    assert {secret(seed) for seed in range(1000)} == set(range(NUMBERS))


def test_random_games_are_consistent_with_the_hints():
    total = 0
    games = list(islice(random_games(0), 4000))
    assert games[:9] == list(islice(random_games(0), 9))
    for game in games:
        messages = game["messages"]
        assert messages[0]["content"] == ASK
        guesses = [int(message["content"]) for message in messages[1::2]]
        low, high = 0, NUMBERS - 1
        for guess, hint in zip(guesses, messages[2::2], strict=False):
            assert low <= guess <= high
            low, high = (guess + 1, high) if hint["content"] == "higher" else (low, guess - 1)
        assert low <= guesses[-1] <= high
        total += len(guesses)
    assert 6.5 < total / len(games) < 6.78


def test_the_written_rows_name_the_number_so_that_agents_can_play_them():
    files = make_guess(rows=1)
    secrets = [row["secret"] for row in files["games"]]
    assert set(secrets) == set(range(NUMBERS))
    assert {row["secret"] for row in files["held_out"]} == set(range(NUMBERS))
    assert not [row for row in files["games"] if row in files["held_out"]]
