"""What a recorded decoding step reads is what the scheduler planned. That replaying it equals the
model is shown by the engine's own tests, run on a GPU (BURNISH_TEST_DEVICE=cuda)."""

import numpy as np
import pytest

from burnish.engine.graphs import EMPTY, FIELDS, inputs, padded
from burnish.engine.protocol import Request
from burnish.engine.sequence import Group, Sequence
from burnish.types import SamplingParams


def sample(tokens: list[int], computed: int, pages: list[int]) -> Sequence:
    group = Group(Request("r", np.array(tokens, np.int32), 1, SamplingParams()))
    found = group.sequences[0]
    found.computed, found.pages = computed, pages
    return found


def test_inputs_say_where_each_row_reads_and_writes() -> None:
    samples = [sample([5, 6, 7, 8, 9, 10], 5, [3, 1]), sample([11], 0, [7])]
    given = inputs(samples, 8, size=4)
    fields, pages = given[: FIELDS * 8].reshape(FIELDS, 8), given[FIELDS * 8 :]
    assert fields[:, 0].tolist() == [10, 5, 1 * 4 + 1, 0, 6]
    assert fields[:, 1].tolist() == [11, 0, 7 * 4, 2, 1]
    assert all(tuple(row) == EMPTY for row in fields[:, 2:].T)
    assert pages.tolist() == [3, 1, 7]


@pytest.mark.parametrize(
    ("rows", "want"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 128), (129, 256), (1000, 1024)]
)
def test_rows_are_rounded_up(rows: int, want: int) -> None:
    assert padded(rows) == want
