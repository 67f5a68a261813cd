"""A reward defined in a running script, without running the script again.

A script that calls ``burnish.train`` at its top level, with no main guard, must not do so a second
time in a worker. So a worker runs the script's definitions only.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
ACTIONS = (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def definitions(path: Path) -> ast.Module | None:
    """The script's imports, functions, classes and constants; None if they depend on the rest.

    They do where a definition reads a name that a statement left out sets, or a constant that such
    a statement, or a function that it calls, mentions and so might change.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError):
        return None
    kept = [s for s in tree.body if isinstance(s, DEFINITIONS) or _is_constant(s)]
    left_out: list[ast.AST] = [s for s in tree.body if s not in kept]
    constants = _names([s for s in kept if isinstance(s, ASSIGNMENTS)], ast.Store)
    run = left_out + _called(left_out, kept)
    changed = bound(left_out) | (_names(run, ast.Load, ast.Store) & constants)
    if changed & _names(kept, ast.Load):
        return None
    return ast.Module(body=kept, type_ignores=[])


def _is_constant(statement: ast.stmt) -> bool:
    if not isinstance(statement, ASSIGNMENTS):
        return False
    return not any(isinstance(node, ACTIONS) for node in ast.walk(statement))


def _called(callers: Sequence[ast.AST], definitions: Sequence[ast.AST]) -> list[ast.AST]:
    """The functions and classes that the callers call by name, and those that these call."""
    found: list[ast.AST] = []
    waiting = list(callers)
    while waiting:
        calls = [n.func for n in ast.walk(waiting.pop()) if isinstance(n, ast.Call)]
        names = {function.id for function in calls if isinstance(function, ast.Name)}
        fresh = [d for d in definitions if getattr(d, "name", None) in names and d not in found]
        found += fresh
        waiting += fresh
    return found


def bound(statements: Sequence[ast.AST]) -> set[str]:
    """Every name that the statements may set, also by def, class or import inside an if or try."""
    bound = _names(statements, ast.Store, ast.Del)
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).split(".")[0])
    return bound


def _names(statements: Sequence[ast.AST], *contexts: type[ast.expr_context]) -> set[str]:
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, contexts)}
