"""The shape of the package: rooms, levels of imports, cycles, and one meaning per public name.

A room is a top-level folder or file of the package. Imports inside functions and under
TYPE_CHECKING count as well, because a reader follows them, too.
"""

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import burnish

PACKAGE = Path(burnish.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
TOP = {"burnish", "__main__", "api", "types", "errors", "grpo", "randomness", "calls"}
"""Rooms that are single files."""


def imports(name):
    """The modules of the package that a module imports."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            own = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in FILES else node.module for full in own}
    return {found for found in found if found in FILES and found != name}


def room(name):
    return name.split(".")[1] if "." in name else "burnish"


def room_imports():
    found = defaultdict(set)
    for name in FILES:
        found[room(name)] |= {room(other) for other in imports(name)} - {room(name)}
    return found


def functions():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                yield (
                    name,
                    node,
                    [
                        ast.unparse(a.annotation).replace("RecipeName", "")
                        for a in given
                        if a.annotation
                    ],
                )


def test_rooms_and_levels():
    rooms = room_imports()
    assert len(rooms) <= 24
    assert {room for room in rooms if (PACKAGE / f"{room}.py").exists()} | {"burnish"} == TOP

    @cache
    def level(room):
        return 1 + max(map(level, rooms[room]), default=0)

    assert max(map(level, rooms)) <= 12


def test_no_cycles_between_rooms_or_files():
    for graph in (room_imports(), {name: imports(name) for name in FILES}):
        TopologicalSorter(graph).prepare()  # it raises CycleError


def test_few_functions_take_a_whole_recipe():
    takers = [name for name, _, given in functions() if any("Recipe" in a for a in given)]
    assert len(takers) <= 40
    assert {room(name) for name in takers} <= {"recipe", "launch", "api", "cli"}
    resolved = [name for name, _, given in functions() if "Resolved" in given]
    assert len(resolved) <= 20
    assert {room(name) for name in resolved} == {"launch"}


def test_one_name_has_one_meaning():
    places = defaultdict(set)
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                places[node.name].add(name)
    several = {name: found for name, found in places.items() if found and not name.startswith("_")}
    assert len([name for name, found in several.items() if len(found) > 1]) <= 15


def test_no_module_of_the_package_is_imported_by_string():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                assert "burnish" not in ast.unparse(node), name
