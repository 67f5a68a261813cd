import time

import pytest

from burnish.graders.keywords import REWARDS, inclusion, lists, use


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("An apple is red.", 2),
        ("APPLE! Red?", 2),
        ("The apple's skin, well-red", 2),
        ("Pineapples were reduced", 0),
        ("red_apple", 0),
        ("red", 1),
        ("", 0),
    ],
)
def test_whole_words(response, found):
    every = float(found == 2)
    assert inclusion(response, ["apple", "Red"]) == {
        "reward": every,
        "inclusion": every,
        "fraction": found / 2,
    }


def test_letters_beyond_ascii():
    assert inclusion("Ein CAFE\u0301 an der STRASSE", ["café", "straße"])["reward"] == 1


def test_keywords_are_text_and_not_patterns():
    assert inclusion("a.b", ["a.b"])["reward"] == 1
    assert inclusion("axb", ["a.b"])["reward"] == 0


def test_the_row_says_what_to_look_for():
    for reward in REWARDS.values():
        assert reward("reduced", {"keywords": ["red"]})["reward"] == 0
        with pytest.raises(ValueError, match="needs rows with a field keywords"):
            reward("red", {"prompt": "…"})


@pytest.mark.parametrize(
    ("response", "used", "reward"),
    [
        ("The red apple fell.", 1, 1),
        ("An apple is red.", 1, 1),
        ("Red and apple do not rhyme.", 1, 1),
        ("The words are red, apple.", 0, 0),
        ("The words are red, and apple.", 0, 0),
        ("red: apple", 0, 0),
        ('"red" and "apple" are words.', 0, 0),
        ("He wrote “red apple” down.", 0, 0),
        ("‘red’ ‘apple’", 0, 0),
        ("red apple red", 0, 0),  # three side by side
        ("It was red, apple. The apple was ripe.", 0.5, 0),  # red only in a list
        ("Red, apple: the apple is a red one.", 1, 1),  # once in a list, once used
        ("A red apple, a red plum, a red sky.", 1, 0),  # red three times
        ("Under the apple. Red leaves lay there.", 1, 1),  # two sentences are no list
        ("The apple's red skin", 1, 1),
        ("Only red", 0.5, 0),
        ("", 0, 0),
    ],
)
def test_a_word_counts_where_it_is_used(response, used, reward):
    parts = use(response, ["red", "apple"])
    assert (parts["used"], parts["reward"]) == (used, reward)


def test_three_side_by_side_are_a_list_whatever_stands_between_them():
    words = ["old", "red", "apple"]
    for response in ("old red apple", "old and red and apple", "old - red; apple"):
        assert use(response, words)["used"] == 0
    assert use("An old, juicy, red fruit: an apple.", words)["reward"] == 1
    assert use("an old and red fruit, an apple", words)["reward"] == 1


@pytest.mark.parametrize(
    ("response", "listed"),
    [
        ("red, apple", True),
        ("'red' or 'apple'", True),
        ("red; apple", True),
        ("red and apple", False),
        ("the red apple", False),
        ("red apple and red", True),
        ("An apple, which is red, fell.", False),
        ("", False),
    ],
)
def test_lists_are_measured_apart_from_the_reward(response, listed):
    assert lists(response, ["red", "apple"]) is listed
    assert REWARDS["use"](response, {"keywords": ["red", "apple"]})["listed"] == listed


def test_a_long_row_of_punctuation_takes_no_time():
    began = time.process_time()
    assert use("red " + "!" * 5000 + " and a ripe apple", ["red", "apple"])["reward"] == 1
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("keywords", [[], "red", ["red", ""]])
def test_what_is_no_list_of_words(keywords):
    with pytest.raises(ValueError, match="must be a list of at least one word"):
        inclusion("red", keywords)
