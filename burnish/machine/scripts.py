"""Executes a user's file in a worker process: of a running script, only its definitions.

This module imports only the standard library, because workers import it.
"""

from __future__ import annotations

import ast
import symtable
from pathlib import Path
from types import ModuleType

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
ACTIONS = (ast.Call, ast.NamedExpr, ast.Await)


def definitions(path: Path) -> ast.Module:
    """Parse a script; return a syntax tree of only its imports, functions, classes and constants
    (assignments without calls)."""
    tree = ast.parse(path.read_bytes(), str(path))
    kept = [s for s in tree.body if isinstance(s, DEFINITIONS) or _is_constant(s)]
    return ast.Module(body=kept, type_ignores=[])


def stands_alone(script: ModuleType, path: Path) -> bool:
    """Return whether a script's definitions behave the same in a worker as in the running script.

    They do not if the script has changed one of its constants, or if they read a name that only the
    script's other statements define.
    """
    tree = definitions(path)
    constants: list[ast.stmt] = [s for s in tree.body if isinstance(s, ASSIGNMENTS)]
    now, afresh = vars(script), dict(vars(script))
    exec(compile(ast.Module(body=constants, type_ignores=[]), "script", "exec"), afresh)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = (loaded & now.keys()) - names_set(ast.unparse(tree))
    changed = [name for name in loaded & now.keys() if repr(afresh[name]) != repr(now[name])]
    return not changed and all(name.startswith("__") for name in missing)


def names_set(code: str) -> set[str]:
    """Return the names that a module's top-level code may define, including inside if and try."""
    symbols = symtable.symtable(code, "code", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def _is_constant(statement: ast.stmt) -> bool:
    if not isinstance(statement, ASSIGNMENTS) or statement.value is None:
        return False
    return not any(isinstance(node, ACTIONS) for node in ast.walk(statement))
