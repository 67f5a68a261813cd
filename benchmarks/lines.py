"""Counts the package's lines of code: not blank lines, comments or docstrings.

python benchmarks/lines.py            by folder, and in all
python benchmarks/lines.py --files    by file, the longest first
"""

from __future__ import annotations

import argparse
import ast
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "burnish"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(path))


def _docstring_lines(path: Path) -> set[int]:
    """Lines of texts that stand alone as statements."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                assert node.end_lineno is not None
                lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def count() -> dict[Path, int]:
    """The code lines of every file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE): code_lines(path) for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="one line per file")
    by_file = parser.parse_args().files
    counts = Counter[str]()
    for path, lines in count().items():
        counts[str(path) if by_file else path.parts[0]] += lines
    for name, lines in counts.most_common():
        print(f"{lines:6,}  {name}")
    print(f"{sum(counts.values()):6,}  in all")


if __name__ == "__main__":
    main()
