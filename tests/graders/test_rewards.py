import ast
import functools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from burnish.errors import DataError
from burnish.graders import scripts
from burnish.graders.rewards import Source, find, load, score
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
    assert score(lambda response, row: value, "", {}) == ("scored", 1.0, {}, None)


@pytest.mark.parametrize("value", [np.zeros(1), 1j, "1", b"1", {"reward": math.nan}, [1], ()])
def test_what_is_no_number(value):
    outcome = score(lambda response, row: value, "", {})
    assert outcome.status == Status.ERROR
    assert math.isnan(outcome.reward)
    assert "must be one finite number" in outcome.message


def test_where_functions_are_found():
    assert find(module_level) == Source(f"{__file__}:module_level", __name__)
    assert find(Holder.static) == Source(f"{__file__}:Holder.static", __name__)
    assert find("inclusion") == Source("inclusion")
    assert find("a/b.py:f") == Source(f"{Path('a/b.py').resolve()}:f")
    here = functools.partial(module_level)
    for kept in (lambda r, row: 1, here, Holder().method, math.hypot):
        assert find(kept) is None
    with pytest.raises(DataError, match="or one of inclusion, use, got 'keyword'"):
        find("keyword")


def test_a_function_replaced_in_its_module_stays_here(monkeypatch):
    original = module_level
    monkeypatch.setattr(sys.modules[__name__], "module_level", lambda r, row: 2)
    assert find(original) is None


def test_a_class_attribute_is_loaded_by_its_path(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("class A:\n    @staticmethod\n    def f(response, row):\n        return 4\n")
    assert load(Source(f"{file}:A.f", "rewards_of_this_test"))("", {}) == 4


@pytest.mark.parametrize(
    ("script", "stands_alone"),
    [
        ("import burnish\nN = 3\ndef f(r, row): return N\nburnish.train('x', reward=f)", True),
        ("ROWS = [1]\ndef f(r, row): return 1\nrun(ROWS, f)", True),
        ("if __name__ == '__main__':\n    run = 3\ndef f(r, row): return 1", True),
        ("WORDS = open('x').read()\ndef f(r, row): return WORDS", False),
        ("WORDS = []\nWORDS.append('x')\ndef f(r, row): return WORDS", False),
        (
            "N = None\ndef setup():\n    global N\n    N = 3\nsetup()\ndef f(r, row): return N",
            False,
        ),
        ("try:\n    import json\nexcept ImportError: pass\ndef f(r, row): return json", False),
        ("for n in range(3): pass\ndef f(r, row): return n", False),
        ("def f(r, row) return 1", False),
    ],
)
def test_a_scripts_definitions(tmp_path, script, stands_alone):
    file = tmp_path / "script.py"
    file.write_text(script)
    tree = scripts.definitions(file)
    assert (tree is not None) == stands_alone
    if tree is not None:
        names: dict[str, object] = {}
        exec(compile(tree, "script", "exec"), names)
        assert names["f"]("", {})
        assert not any(isinstance(s, ast.Expr | ast.If) for s in tree.body)
