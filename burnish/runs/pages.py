"""Pages: templates of jinja2, which escapes every value, under a strict policy.

A page may run the one script that is named after its template, and fetch nothing. Model text
reaches a script as JSON alone.
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
TEMPLATES = Environment(
    loader=PackageLoader("burnish.runs"), autoescape=True, undefined=StrictUndefined
)


def render(page: str, *, live: bool = False, **values: Any) -> str:
    """A page with its values; a ``live`` one may ask the server that it came from."""
    template = TEMPLATES.get_template(f"{page}.html")
    style, script = _text("page.css"), _text(f"{page}.js")
    return template.render(style=style, script=script, policy=policy(page, live=live), **values)


def policy(page: str, *, live: bool = False) -> str:
    """The Content-Security-Policy of a page."""
    digest = base64.b64encode(hashlib.sha256(_text(f"{page}.js").encode()).digest()).decode()
    connects = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'{connects}"
    )


def encode(value: Any) -> Markup:
    """JSON for a script element: all ASCII, and nothing that HTML could take for markup."""
    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


def _text(name: str) -> Markup:
    """A file of this package as it stands; empty if there is none."""
    file = FOLDER / name
    return Markup(file.read_text(encoding="utf-8") if file.is_file() else "")
