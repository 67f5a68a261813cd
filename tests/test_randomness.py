import numpy as np

from burnish.randomness import Stream, permutation, uniforms


def test_a_draw_depends_on_where_it_stands_alone():
    whole = uniforms(
        1, Stream.TRAIN, np.arange(4)[:, None, None], np.arange(3)[:, None], np.arange(5)
    )
    assert whole.shape == (4, 3, 5)
    assert uniforms(1, Stream.TRAIN, 2, 1, 3) == whole[2, 1, 3]


def test_every_word_changes_the_draw():
    base = (1, 0, 5, 2, 7)
    draws = {float(uniforms(*base))}
    for place in range(5):
        for change in (1, 2**32):
            words = list(base)
            words[place] += change
            draws.add(float(uniforms(*words)))
    assert len(draws) == 11
    assert float(uniforms(1, 0, 2, 5, 7)) not in draws  # the order counts


def test_draws_are_uniform_and_independent_of_their_neighbours():
    draws = uniforms(
        0, Stream.TRAIN, np.arange(200)[:, None, None], np.arange(20)[:, None], np.arange(25)
    )
    flat = draws.reshape(-1)
    assert 0 <= flat.min() < 1e-4
    assert 1 - 1e-4 < flat.max() < 1
    counts = np.histogram(flat, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 60 < chi_square < 150  # 99 degrees of freedom: beyond this once in a thousand
    for axis in range(3):
        a, b = np.moveaxis(draws, axis, 0)[:-1], np.moveaxis(draws, axis, 0)[1:]
        assert abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) < 0.015


def test_large_seeds_are_taken():
    assert 0 <= float(uniforms(2**63 - 1, Stream.TASK, 2**40, 0, 0)) < 1


def test_a_permutation_is_a_function_of_where_it_stands():
    first = permutation(1, Stream.TASK, 3, 0, 50)
    assert sorted(first) == list(range(50))
    assert (first == permutation(1, Stream.TASK, 3, 0, 50)).all()
    for words in [(2, Stream.TASK, 3, 0), (1, Stream.TASK, 4, 0), (1, Stream.TASK, 3, 1)]:
        assert not (first == permutation(*words, 50)).all()
    assert permutation(1, Stream.TASK, 0, 0, 0).size == 0
