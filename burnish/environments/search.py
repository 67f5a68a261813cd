"""The tools ``search`` and ``open_document``: full-text search in a folder of text documents.

The index is built in memory when the environment is loaded. The processes of episodes share its
pages and never write to it. Results name their document and line, so that an answer can cite them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from burnish.environments.protocol import ToolError
from burnish.errors import DataError

SUFFIXES = (".txt", ".md", ".markdown", ".rst")
"""Files of a folder that are documents."""
PASSAGE_CHARS = 1000
"""Characters after which a passage of the index ends, at the end of a line."""
SNIPPET_WORDS = 40
MOST_RESULTS = 20
MOST_WORDS = 32
"""Words of a query that are searched."""
PAGE_CHARS = 4000
"""Characters of a document that are returned at once."""
LARGEST_FOLDER = 512 << 20
"""Bytes of documents that a folder may have."""


@dataclass(frozen=True)
class SearchSource:
    """Settings of the tool ``search``."""

    name: ClassVar[str] = "search"
    folder: str


def search_tools(source: SearchSource) -> list[Callable[..., Any]]:
    """Index the documents of a folder; return the tools. Raise a DataError if there are no
    documents, or if one can't be read."""
    return document_tools(read_documents(Path(source.folder)))


def document_tools(documents: Mapping[str, str]) -> list[Callable[..., Any]]:
    """Return the tools for documents, given as texts by name."""
    index = build_index(documents)

    def search(query: str, results: int = 5) -> str:
        """Search the documents for words, and return the passages that fit best, each with its
        document and line.

        Args:
            query: words to search for
            results: number of passages, at most 20
        """
        words = re.findall(r"\w+", query)[:MOST_WORDS]
        if not words:
            raise ToolError("the query has no word")
        count = max(1, min(results, MOST_RESULTS))
        found = index.execute(
            "SELECT document, line, snippet(passages, 2, '', '', '…', ?) FROM passages "
            "WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?",
            (SNIPPET_WORDS, " OR ".join(f'"{word}"' for word in words), count),
        ).fetchall()
        if not found:
            return "no passage has these words"
        return "\n\n".join(
            f"[{number}] {document}, line {line}: {' '.join(text.split())}"
            for number, (document, line, text) in enumerate(found, 1)
        )

    def open_document(document: str, line: int = 1) -> str:
        """Return the text of a document from a line on.

        Args:
            document: the document's name, as search returns it
            line: number of the first line
        """
        text = documents.get(document)
        if text is None:
            known = ", ".join(list(documents)[:10]) + (", …" if len(documents) > 10 else "")
            raise ToolError(f"there is no document {document[:80]!r}; some are {known}")
        lines = text.split("\n")
        if not 1 <= line <= len(lines):
            raise ToolError(f"{document} has the lines 1 to {len(lines)}, got {line}")
        return _page(document, lines, line)

    tools: list[Callable[..., Any]] = [search, open_document]
    for tool in tools:
        vars(tool)["deterministic"] = True
    return tools


def read_documents(folder: Path) -> dict[str, str]:
    """Return the texts of a folder's documents by their paths in it, in alphabetical order. Raise a
    DataError if there are none, they are too large, or one can't be read."""
    if not folder.is_dir():
        raise DataError(f"tool search: there is no folder {folder}")
    kinds, files = ", ".join(SUFFIXES), document_files(folder)
    if not files:
        raise DataError(f"tool search: the folder {folder} has no documents ({kinds})")
    size = sum(file.stat().st_size for file in files)
    if size > LARGEST_FOLDER:
        raise DataError(
            f"tool search: the documents of {folder} must have at most {LARGEST_FOLDER >> 20} MB, "
            f"got {size / 2**20:.0f} MB; select fewer"
        )
    texts = {}
    for file in files:
        try:
            texts[file.relative_to(folder).as_posix()] = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tool search: {file} can't be read as UTF-8 text: {error}") from None
    return texts


def document_files(folder: Path) -> list[Path]:
    """Return the documents below a folder, in alphabetical order."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    return sorted(file for file in found if file.is_file())


def build_index(documents: Mapping[str, str]) -> sqlite3.Connection:
    """Return a database in memory with the passages of documents. It has no file and no lock, so it
    can be read in forks of this process."""
    index = sqlite3.connect(":memory:")
    index.execute("PRAGMA temp_store = MEMORY")
    try:
        index.execute(
            "CREATE VIRTUAL TABLE passages USING fts5(document UNINDEXED, line UNINDEXED, text, "
            "tokenize = 'porter unicode61')"
        )
    except sqlite3.OperationalError as error:
        raise DataError(
            f"tool search: this Python's SQLite has no full-text search ({error}); use a Python "
            "whose SQLite has FTS5"
        ) from None
    for name, text in documents.items():
        rows = ((name, line, passage) for line, passage in passages(text))
        index.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
    index.commit()
    index.execute("PRAGMA query_only = 1")
    return index


def passages(text: str) -> Iterator[tuple[int, str]]:
    """Yield the passages of a text, each with the number of its first line. A passage ends at an
    empty line after half of `PASSAGE_CHARS`, or at the line with which it reaches them."""
    lines: list[str] = []
    size = 0
    for number, line in enumerate(text.split("\n"), 1):
        lines.append(line)
        size += len(line) + 1
        if size >= PASSAGE_CHARS or (not line.strip() and 2 * size >= PASSAGE_CHARS):
            if any(map(str.strip, lines)):
                yield number - len(lines) + 1, "\n".join(lines)
            lines, size = [], 0
    if any(map(str.strip, lines)):
        yield text.count("\n") - len(lines) + 2, "\n".join(lines)


def _page(document: str, lines: list[str], first: int) -> str:
    """Return lines of a document up to `PAGE_CHARS`, and where it continues."""
    shown: list[str] = []
    size = 0
    for line in lines[first - 1 :]:
        if shown and size + len(line) > PAGE_CHARS:
            break
        shown.append(line)
        size += len(line) + 1
    after = first + len(shown)
    end = f"\n[continues at line {after} of {len(lines)}]" if after <= len(lines) else ""
    head = f"{document}, lines {first} to {after - 1}"
    return f"{head}:\n" + "\n".join(line[:PAGE_CHARS] for line in shown) + end
