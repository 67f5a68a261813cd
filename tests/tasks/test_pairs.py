"""Rows of pairs: which are refused, and why."""

import pytest

from burnish.errors import DataError
from tests.learner.preference_pairs import ROWS, groups


def test_rows_that_are_no_pairs_are_refused():
    for change, said in (
        ({"chosen": ""}, "needs a text 'chosen'"),
        ({"rejected": 3}, "needs a text 'rejected'"),
        ({"rejected": ROWS[0]["chosen"]}, "are the same text"),
    ):
        with pytest.raises(DataError, match=f"row 0: .*{said}"):
            groups([ROWS[0] | change])
    with pytest.raises(DataError, match=r"its longest response are 19 tokens, .* is 18"):
        groups(context=18)
    with pytest.raises(DataError, match=r"all its responses are 23 tokens, .* is 22"):
        groups(together=22)
