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


DISTRIBUTED = (
    *("actors", "distribute.py", "strategy.py", "chaos.py", "loops/asynchronous.py"),
    *("loops/free.py", "rollout/buffer.py", "rollout/pace.py", "rollout/saved.py"),
    *("runs/ledger.py", "runs/timeline.py", "sweep.py"),
)
"""Files and folders that are there for Ray and for learning from old tokens."""


ENGINES = (
    *("learner/parallel.py", "learner/ranks.py", "learner/slices.py", "learner/watch.py"),
    *("loops/conductor.py", "runs/shards.py", "schema/mesh.py", "torchrun.py", "__main__.py"),
    *("engine/wire.py", "engine/serving.py", "engine/remote.py", "engine/listening.py"),
    *("engine/environment.py", "engine/check.py", "engine/vllm.py", "engine/hf.py"),
    *("engine/sglang.py", "engine/sglang_weights.py", "engine/callers.py"),
    *("engine/shapes.py", "engines.py", "engine_commands.py", "schema/engines.py"),
)
"""Files that are there for other engines and for the mesh."""


def is_distributed(path: Path) -> bool:
    return path.as_posix().startswith(DISTRIBUTED)


def is_other_engine(path: Path) -> bool:
    return path.as_posix().startswith(ENGINES)


def count() -> dict[Path, int]:
    """The code lines of every file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE): code_lines(path) for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="one line per file")
    by_file = parser.parse_args().files
    counts = Counter[str]()
    apart = sum(lines for path, lines in count().items() if is_distributed(path))
    others = sum(lines for path, lines in count().items() if is_other_engine(path))
    for path, lines in count().items():
        counts[str(path) if by_file else path.parts[0]] += lines
    for name, lines in counts.most_common():
        print(f"{lines:6,}  {name}")
    whole = sum(counts.values())
    core = f"{whole - apart - others:,} of the core, {apart:,} for Ray and old tokens"
    print(f"{whole:6,}  in all: {core}, {others:,} for other engines and the mesh")


if __name__ == "__main__":
    main()
