import dataclasses
from itertools import pairwise

import pytest

from burnish.errors import ConfigError
from burnish.recipe.tasks import KeywordsTask
from burnish.tasks.keywords import instruction, make_keywords, split_words, word_list
from burnish.types import Finish
from tests.conftest import byte_tokenizer, make_group


def make(seed=0, **settings):
    return make_keywords(KeywordsTask(**settings), tokenizer=byte_tokenizer(), seed=seed)


def draw(task, index):
    return task.prompt(index).reference["keywords"]


def test_the_word_list():
    words = word_list()
    assert len(words) >= 1000
    assert list(words) == sorted(set(words))
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    # Sorted, a word that begins others stands right before one of them.
    assert not [b for a, b in pairwise(words) if b.startswith(a)]


def test_prompts_mix_two_to_four_words_and_come_from_the_seed():
    task = make()
    drawn = [draw(task, i) for i in range(600)]
    counts = [sum(len(words) == n for words in drawn) for n in (2, 3, 4)]
    assert sum(counts) == 600
    assert min(counts) > 150
    assert all(len(set(words)) == len(words) for words in drawn)
    assert len({word for words in drawn for word in words}) > 0.6 * len(split_words(task.config)[0])
    assert [draw(make(), i) for i in range(5)] == drawn[:5]
    assert draw(make(seed=1), 0) != drawn[0]
    prompt = task.prompt(3)
    assert prompt.reference["keywords"] == drawn[3]
    assert prompt.reference["prompt"] == instruction(drawn[3])
    assert prompt.text == f"<user>{instruction(drawn[3])}<assistant>2026"
    assert instruction(["apple", "red"]) == "Write a sentence that includes the words: apple, red."


def test_train_and_validation_share_no_word():
    task = make(validation_prompts=300)
    train = {word for i in range(500) for word in draw(task, i)}
    validation = {word for p in task.validation for word in p.reference["keywords"]}
    assert len(task.validation) == 300
    assert len(validation) > 200
    assert not train & validation
    words, held_out = split_words(task.config)
    assert not set(words) & set(held_out)
    assert len(words) + len(held_out) == len(word_list())


def test_no_word_held_out_leaves_other_sets_of_the_same_words():
    task = make(validation_words=0)
    assert split_words(task.config) == (sorted(word_list()), sorted(word_list()))
    train = {tuple(sorted(draw(task, i))) for i in range(500)}
    held_out = {tuple(sorted(p.reference["keywords"])) for p in task.validation}
    assert len(held_out) == 256
    assert not train & held_out


def test_few_words_are_some_of_the_list_and_their_sets_stay_apart():
    task = make(words=40, validation_words=0, least=1, most=2)
    words, _ = split_words(task.config)
    assert len(words) == 40
    assert set(words) < set(word_list())
    train = {tuple(sorted(draw(task, i))) for i in range(2000)}
    held_out = {tuple(sorted(p.reference["keywords"])) for p in task.validation}
    assert not train & held_out
    assert 0.15 < len(held_out) / len(held_out | train) < 0.25
    assert {word for some in train for word in some} == set(words)


@pytest.mark.parametrize(
    "settings", [{"words": 9}, {"words": 3, "validation_words": 0}, {"words": 5000}]
)
def test_too_few_or_too_many_words_are_refused(settings):
    with pytest.raises(ConfigError, match=r"task.words must be at most 1\d\d\d and leave"):
        make(**settings)


def test_words_that_make_a_single_set_are_refused():
    with pytest.raises(ConfigError, match="too few sets of 2 to 2 words"):
        make(words=2, validation_words=0, least=2, most=2).prompt(0)


@pytest.mark.parametrize("must_end", [False, True])
def test_grades(must_end):
    task = make(must_end=must_end, least=2, most=2)
    prompt = task.prompt(0)
    first, second = prompt.reference["keywords"]
    (base,) = make_group(0, [1], [[1]], [0]).completions

    def grade(text, finish):
        return task.grade_all([(prompt, dataclasses.replace(base, text=text, finish=finish))])[0]

    right = grade(f"The {first.upper()} and {second}.", Finish.STOP)
    assert (right.reward, right.parts) == (
        1,
        {"inclusion": 1, "fraction": 1, "listed": 0, "ended": 1},
    )
    cut = grade(f"The {first} and {second}", Finish.LENGTH)
    assert cut.reward == float(not must_end)
    assert cut.parts == {"inclusion": 1, "fraction": 1, "listed": 0, "ended": 0}
    inside = grade(f"{first} x{second}x", Finish.STOP)
    assert inside.reward == 0
    assert inside.parts["fraction"] == 0.5


def test_what_is_held_out_is_the_same_for_every_seed():
    one, other = make(seed=1), make(seed=2)
    assert one.validation[3].text == other.validation[3].text
    assert draw(one, 3) != draw(other, 3)
