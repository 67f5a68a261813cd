"""`benchmarks/lines.py` counts lines of code."""

import runpy
from pathlib import Path

LINES = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "lines.py"))


def test_blank_lines_comments_and_docstrings_are_no_code(tmp_path):
    source = '"""Says\nwhat."""\n\n# why\nx = """a\nb"""  # two lines\n\n\n'
    source += 'def f():\n    "no code"\n    return (\n        x\n    )\n'
    (tmp_path / "m.py").write_text(source)
    assert LINES["code_lines"](tmp_path / "m.py") == 6


def test_the_report_counts_every_file_of_the_package():
    counted = set(LINES["count"]())
    package = Path(__file__).parents[1] / "burnish"
    assert counted == {path.relative_to(package) for path in package.rglob("*.py")}
