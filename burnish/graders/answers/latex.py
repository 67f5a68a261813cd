"""Conversion of an expression to LaTeX that the parser reads correctly: all tokens are known, and
products that the parser would read as mixed numbers are written explicitly."""

from __future__ import annotations

import re
from functools import lru_cache

from burnish.graders.answers.spelling import FUNCTIONS

DEEPEST = 20
"""Largest nesting depth of brackets."""
_GREEK = "(?i:alpha|beta|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|psi|omega)|gamma"
_TOKEN = re.compile(
    rf"\\(?:{FUNCTIONS})(?![A-Za-z])(?:[\^_](?:\{{[-+0-9A-Za-z/. ]*\}}|\w))*"
    rf"|\\(?:frac|sqrt|binom|[lr]floor|[lr]ceil|{_GREEK})(?![A-Za-z])"
    r"|(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<letter>[A-Za-z](?:_(?:\{\w+\}|\w))?)"
    r"|[-+·/^!|(){}\[\]=π∞ ]",
    re.ASCII,
)
# Text that is not converted: 2 3, 1e5; huge powers and factorials; dy/dx, x^T; 2 to 1; sin x·y.
_REFUSED = re.compile(
    r"(?<![_^])[0-9]\.? [0-9]|[0-9][eE][-+]?[0-9]|[0-9]{200}|\\[a-z]+\^\{?0"
    r"|\^\{?-?(?:[0-9]{6}|(?![23]\^[0-9]\})[0-9]+\}?\^)|[0-9]{5}!|!\)*!"
    r"|d ?/ ?d|\\frac ?\{ ?d|\^\{?T|[EIei]_|(?<![\\A-Za-z])[A-Za-z]{2,} [0-9]"
    rf"|\\(?:{FUNCTIONS})(?![A-Za-z])[^()+=-]*·",
    re.ASCII,
)
_ARGUMENT = re.compile(r"\( ?[-+]?[0-9]+(?:[./][0-9]+)? ?\)")
_LATEX = {"π": r"\pi ", "·": r"\cdot ", "∞": r"\infty "}


@lru_cache(maxsize=4096)
def latex(text: str) -> str | None:
    """Convert the normalised text of an expression or equation to LaTeX that math-verify's parser
    reads correctly.

    Return None if the text has an unknown token, if the parser might misread it, or if it is too
    costly to evaluate (deep nesting, huge powers or factorials).
    """
    if text.count("|") % 2 or _REFUSED.search(text) or not re.search(r"\w|[π∞]", text):
        return None
    text = re.sub(r"(?<![\w.}^])([0-9]+) ?(\\frac\{[0-9]+\}\{[0-9]+\})", r"(\1+\2)", text)
    text = re.sub(r"(?<![\w.}^)])([0-9]+)/([0-9]+)(?![0-9.^!])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"([0-9.]+) ?°", r"(\1·π/180)", text)
    written: list[str] = []
    at, depth, value = 0, 0, False
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token.start() != at or depth > DEEPEST:
            return None
        at = token.end()
        if token[0] == " ":
            continue
        if value and (token["number"] or token[0] in ("(", "[", r"\frac", r"\binom")):
            written.append(_LATEX["·"])
        written.append(_LATEX.get(token[0]) or token[0] + " " * (token[0][0] == "\\"))
        value = bool(token["number"]) or token[0] in ("π", ")", "}", "!")
        if token["letter"]:  # P(0) and f(x) are not products
            value = token[0] not in "fghFG" and not _ARGUMENT.match(text, at)
    return "".join(written) if at == len(text) else None
