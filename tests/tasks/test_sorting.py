import numpy as np
import pytest

from burnish.recipe.tasks import SortTask
from burnish.tasks.sorting import Sorting, inclusion_ordering, position_match
from tests.conftest import make_group


@pytest.mark.parametrize(
    ("response", "matches"), [([0, 1, 2], 3), ([0, 2, 1], 1), ([2, 0, 1], 0), ([0, 1, 1], 2)]
)
def test_position_match(response, matches):
    assert position_match([1, 0, 2], response) == {"position": matches}


@pytest.mark.parametrize(
    ("response", "inclusion", "ordering"),
    [([0, 1, 2], 3, 2), ([2, 1, 0], 3, 0), ([0, 0, 0], 1, 2), ([3, 4, 2], 1, 1), ([1, 0, 0], 2, 1)],
)
def test_inclusion_ordering(response, inclusion, ordering):
    assert inclusion_ordering([1, 0, 2], response) == {"inclusion": inclusion, "ordering": ordering}


def test_a_repeated_number_leaves_the_lectures_loophole():
    right, wrong = (inclusion_ordering([1, 0, 1], r) for r in ([0, 1, 1], [0, 0, 1]))
    assert right == wrong


def test_prompts_come_from_the_seed_and_in_turn():
    config = SortTask(prompts=4, length=5, numbers=7)
    task, same, other = Sorting(config, seed=1), Sorting(config, seed=1), Sorting(config, seed=2)
    numbers = np.stack([prompt.token_ids for prompt in task.prompts])
    assert np.array_equal(numbers, np.stack([prompt.token_ids for prompt in same.prompts]))
    assert not np.array_equal(numbers, np.stack([prompt.token_ids for prompt in other.prompts]))
    assert numbers.shape == (4, 5)
    assert 0 <= numbers.min() <= numbers.max() < 7
    assert [task.prompt(i).prompt_id for i in (0, 3, 4, 9)] == [
        "sort/0",
        "sort/3",
        "sort/0",
        "sort/1",
    ]


def test_grades():
    task = Sorting(SortTask(), seed=0)
    group = make_group(0, [2, 0, 4], [[0, 2, 4], [0, 4, 2]], [0, 0])
    right, wrong = task.grade_all([(group.prompt, c) for c in group.completions])
    assert (right.reward, right.parts["sorted"]) == (5.0, 1.0)
    assert (wrong.reward, wrong.parts["sorted"]) == (4.0, 0.0)
