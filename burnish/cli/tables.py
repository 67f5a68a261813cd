"""Terminal output: plain text, tables, and the sections of a plan."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burnish.recipe.plan import PlanSection

out_console = Console(highlight=False, emoji=False)
err_console = Console(highlight=False, emoji=False, stderr=True)


def print_text(text: str) -> None:
    """Print text without markup and without wrapping."""
    out_console.print(text, markup=False, soft_wrap=True)


def print_table(rows: Iterable[Iterable[str]]) -> None:
    """Print a table; its cells may contain rich markup."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    out_console.print(table)


def print_sections(sections: Iterable[PlanSection]) -> None:
    """Print sections of (name, value) rows under their titles."""
    for title, rows in sections:
        out_console.print(f"[bold]{title}")
        print_table((f"  {escape(what)}", escape(value)) for what, value in rows)
