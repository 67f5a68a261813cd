"""Pages: templates of jinja2, which escapes every value, under a strict policy.

A page may run its own script and fetch nothing. Model text reaches a script as JSON alone.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

FOLDER = Path(__file__).parent / "templates"
SCRIPTS = {
    "report": ("charts.js", "report.js"),
    "comparison": ("charts.js", "comparison.js"),
    "runs": ("runs.js",),
    "results": (),
}
"""The files that make the script of each page."""
TEMPLATES = Environment(
    loader=PackageLoader("burnish.runs"), autoescape=True, undefined=StrictUndefined
)


def render(page: str, *, live: bool = False, **values: Any) -> str:
    """A page with its values; a ``live`` one may ask the server that it came from."""
    template = TEMPLATES.get_template(f"{page}.html")
    style, script = Markup((FOLDER / "page.css").read_text(encoding="utf-8")), _script(page)
    return template.render(style=style, script=script, policy=policy(page, live=live), **values)


def policy(page: str, *, live: bool = False) -> str:
    """The Content-Security-Policy of a page."""
    digest = base64.b64encode(hashlib.sha256(_script(page).encode()).digest()).decode()
    connects = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'{connects}"
    )


def encode(value: Any) -> Markup:
    """JSON for a script element: all ASCII, and nothing that HTML could take for markup."""
    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


def _script(page: str) -> Markup:
    return Markup("".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS[page]))
