"""Definitions of scripts: what a worker executes of a running one."""

import sys
import types

from burnish.machine.scripts import definitions, names_set, stands_alone

SCRIPT = """
import math
LIMIT = 3
LOADED = open
OPENED = len("abc")

def score(text):
    return LIMIT

class Game:
    pass

print("ran")
LIMIT = 4
"""


def executed(path):
    found = {}
    exec(compile(definitions(path), str(path), "exec"), found)
    return found


def test_only_imports_functions_classes_and_constants_are_executed(tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    found = executed(path)
    assert {"math", "LIMIT", "LOADED", "score", "Game"} <= found.keys()
    assert "OPENED" not in found
    assert found["score"]("") == 4
    assert capsys.readouterr().out == ""


def test_names_set_are_those_of_any_branch():
    code = (
        "import os as system\nif x:\n    a = 1\nelse:\n    def b(): c = 2\n"
        "try:\n    pass\nfinally:\n    d = 1"
    )
    assert names_set(code) == {"system", "a", "b", "d"}


def test_a_script_stands_alone_if_its_definitions_suffice(tmp_path):
    path = tmp_path / "script.py"
    for code, expected in (
        ("A = 1\ndef f():\n    return A\n", True),
        ("A = len('x')\ndef f():\n    return A\n", False),
        ("A = []\ndef f():\n    return A\nA.append(1)\n", False),
    ):
        path.write_text(code)
        module = types.ModuleType("script_of_a_test")
        sys.modules[module.__name__] = module
        exec(compile(code, str(path), "exec"), vars(module))
        assert stands_alone(module, path) is expected
    del sys.modules["script_of_a_test"]
