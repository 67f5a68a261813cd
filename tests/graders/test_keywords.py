import pytest

from burnish.graders.keywords import inclusion, reward


@pytest.mark.parametrize(
    ("response", "words", "substrings"),
    [
        ("An apple is red.", 2, 2),
        ("APPLE! Red?", 2, 2),
        ("The apple's skin, well-red", 2, 2),
        ("Pineapples were reduced", 0, 2),
        ("red_apple", 0, 2),
        ("red", 1, 1),
        ("", 0, 0),
    ],
)
def test_words_and_substrings(response, words, substrings):
    keywords = ["apple", "Red"]
    for match, found in (("word", words), ("substring", substrings)):
        every = float(found == 2)
        assert inclusion(response, keywords, match) == {
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
    assert reward("reduced", {"keywords": ["red"]})["reward"] == 0
    assert reward("reduced", {"keywords": ["red"], "match": "substring"})["reward"] == 1
    with pytest.raises(ValueError, match="needs rows with a field keywords"):
        reward("red", {"prompt": "…"})
    with pytest.raises(ValueError, match="match must be word or substring, got 'prefix'"):
        reward("red", {"keywords": ["red"], "match": "prefix"})


@pytest.mark.parametrize("keywords", [[], "red", ["red", ""]])
def test_what_is_no_list_of_words(keywords):
    with pytest.raises(ValueError, match="must be a list of at least one word"):
        inclusion("red", keywords)
