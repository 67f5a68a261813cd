"""HTML pages: jinja2 templates with autoescaping and a strict Content-Security-Policy.

A page may only run its own script and load nothing else. Model text reaches scripts only as JSON.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from burnish.console.text import printable

FOLDER = Path(__file__).parent / "templates"
SCRIPTS = {
    "report": ("charts.js", "report.js"),
    "comparison": ("charts.js", "comparison.js"),
    "runs": ("runs.js",),
    "results": (),
}
"""Source files of each page's script, by the page's name."""
TEMPLATES = Environment(
    loader=PackageLoader("burnish.runs"), autoescape=True, undefined=StrictUndefined
)
TEMPLATES.filters["printable"] = printable


def render(page: str, *, live: bool = False, **values: Any) -> str:
    """Return the HTML of ``page``, a key of ``SCRIPTS``; ``values`` fill its template. A ``live``
    page may send requests to its own server."""
    template = TEMPLATES.get_template(f"{page}.html")
    style, script = Markup((FOLDER / "page.css").read_text(encoding="utf-8")), _script(page)
    return template.render(style=style, script=script, policy=policy(page, live=live), **values)


def policy(page: str, *, live: bool = False) -> str:
    """Return the Content-Security-Policy of ``page``, a key of ``SCRIPTS``: it may only run its own
    script. A ``live`` page may also send requests to its own server."""
    digest = base64.b64encode(hashlib.sha256(_script(page).encode()).digest()).decode()
    connects = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'{connects}"
    )


def to_script_json(value: Any) -> Markup:
    """Encode a value as JSON for a script element: ASCII only, without characters that HTML could
    interpret as markup. Raise ValueError for NaN and infinity."""
    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


def _script(page: str) -> Markup:
    return Markup("".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS[page]))
