import ast
import asyncio
import functools
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from burnish.errors import DataError
from burnish.graders import rewards
from burnish.graders.rewards import (
    Source,
    batched,
    find_source,
    score,
    score_async,
    score_batch,
)
from burnish.types import Status


def module_level(response, row):
    return 1.0


class Holder:
    @staticmethod
    def static(response, row):
        return 2.0

    def method(self, response, row):
        return 3.0


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), {"reward": np.float64(1)}])
def test_numbers_of_any_make(value):
    assert score(lambda response, row: value, "", {})[:5] == ("scored", 1.0, {}, None, True)


@pytest.mark.parametrize(
    ("value", "correct"),
    [
        (1.5, True),
        (1 - 1e-9, True),
        (0.9, False),
        ({"reward": 0.3, "correct": True}, True),
        ({"reward": 7.0, "correct": False}, False),
        ({"reward": 7.0, "correct": None}, None),
        ({"reward": 0.0, "correct": np.True_}, True),
        ({"reward": 0.0, "status": "unparsed"}, False),
    ],
)
def test_a_reward_may_say_which_responses_are_correct(value, correct):
    outcome = score(lambda response, row: value, "", {})
    assert outcome.correct is correct
    assert "correct" not in outcome.parts


@pytest.mark.parametrize("said", [0.5, "yes", 2])
def test_correct_is_yes_or_no(said):
    outcome = score(lambda response, row: {"reward": 1.0, "correct": said}, "", {})
    assert outcome.status == Status.ERROR
    assert "correct must be True, False or None" in outcome.message


@pytest.mark.parametrize("value", [np.zeros(1), 1j, "1", b"1", {"reward": math.nan}, [1], ()])
def test_what_is_no_number(value):
    outcome = score(lambda response, row: value, "", {})
    assert outcome.status == Status.ERROR
    assert math.isnan(outcome.reward)
    assert "must be one finite number" in outcome.message


def test_only_a_reward_that_is_not_batched_is_told_how_to_grade_lists():
    """TRL's rewards return a list; in a batched reward, the list is right and its item wrong."""

    async def waited(response, row):
        return [1.0]

    plain = score(lambda response, row: [1.0], "", {})
    awaited = asyncio.run(score_async(waited, "", {}, 1.0))
    (in_batch,) = score_batch(batched(lambda responses, rows: [[1.0]]), [""], [{}], None)
    said = "reward must be one finite number, got list [1.0]"
    assert plain.message == awaited.message == f"{said}; {rewards.ONE_RESPONSE}"
    assert in_batch.message == said


def test_where_functions_are_found():
    assert find_source(module_level) == Source(f"{__file__}:module_level", __name__)
    assert find_source("inclusion") == Source("inclusion")
    assert find_source("a/b.py:f") == Source(f"{Path('a/b.py').resolve()}:f")
    here = functools.partial(module_level)
    for kept in (lambda r, row: 1, here, Holder.static, Holder().method, math.hypot):
        assert find_source(kept) is None
    with pytest.raises(DataError, match=r"or one of inclusion, .*none, got 'keyword'"):
        find_source("keyword")


def test_a_function_replaced_in_its_module_stays_here(monkeypatch):
    original = module_level
    monkeypatch.setattr(sys.modules[__name__], "module_level", lambda r, row: 2)
    assert find_source(original) is None


@pytest.mark.parametrize(
    ("script", "alone"),
    [
        ("import json\nN = 3\ndef f(r, row): return N\nprint(f)", True),
        ("ROWS = [1]\ndef f(r, row): return 1\nprint(ROWS)", True),
        ("if __name__ == 'burnish_script':\n    run = 3\ndef f(r, row): return 1", True),
        ("WORDS = str(3)\ndef f(r, row): return WORDS", False),
        ("WORDS = []\nWORDS.append('x')\ndef f(r, row): return WORDS", False),
        (
            "N = None\ndef setup():\n    global N\n    N = 3\nsetup()\ndef f(r, row): return N",
            False,
        ),
        ("N: int\nN = int('3')\ndef f(r, row): return N", False),
        ("try:\n    import json\nexcept ImportError: pass\ndef f(r, row): return json", False),
        ("for n in range(3): pass\ndef f(r, row): return n", False),
    ],
)
def test_a_scripts_definitions(tmp_path, script, alone):
    file = tmp_path / "script.py"
    file.write_text(script)
    running = types.ModuleType("burnish_script")
    exec(script, vars(running))
    assert rewards.stands_alone(running, file) == alone
    if alone:
        tree = rewards.definitions(file)
        names: dict[str, object] = {}
        exec(compile(tree, "script", "exec"), names)
        assert names["f"]("", {})
        assert not any(isinstance(s, ast.Expr | ast.If) for s in tree.body)
