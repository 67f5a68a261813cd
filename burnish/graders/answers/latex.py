"""An expression in LaTeX that the parser reads as it is meant: all tokens are known, all products
are written, and all names but small letters are exchanged for names that mean nothing to it."""

from __future__ import annotations

import re
from functools import lru_cache

from burnish.graders.answers.spelling import FUNCTIONS, GREEK

DEEPEST = 20
"""Brackets within brackets."""
_TOKEN = re.compile(
    rf"\\(?:{FUNCTIONS})(?![A-Za-z])(?:[\^_](?:\{{[-+0-9A-Za-z/. ]*\}}|\w))*"
    rf"|\\(?:frac|sqrt|binom|[lr]floor|[lr]ceil)(?![A-Za-z])|(?P<greek>\\(?:{GREEK})(?![A-Za-z]))"
    r"|(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<letter>[A-Za-z](?:_(?:\{\w+\}|\w))?)"
    r"|[-+·/^!|(){}\[\]=<>≤≥π∞ ]",
    re.ASCII,
)
_REFUSED = re.compile(  # two numbers side by side, 1e5, d/dx, what would take for ever
    r"(?<![_^])[0-9]\.? [0-9]|[0-9][eE][-+]?[0-9]|[0-9]{200}|\\[a-z]+\^\{?0"
    r"|\\frac ?\{ ?d ?(?:[-+0-9]|\}\{ ?d)|\^\{?-?(?:[0-9]{6}|[0-9]+\}?\^)|[0-9]{5}!|!\)*!",
    re.ASCII,
)
_TOWER = re.compile(r"\^\{([0-9]{1,2})\^(?:([0-9])|\{([0-9]{1,2})\})\}")
_LETTER = rf"(?:[A-Za-z]|\\(?:{GREEK})(?![A-Za-z]))(?:_(?:\{{\w+\}}|\w))?"
_VALUE = re.compile(  # dy/dx or P(0), but not the b(8) of \log_b(8), nor the n(2) of x^n(2)
    rf"(?P<value>\\frac ?\{{ ?d ?{_LETTER} ?\}}\{{ ?d ?{_LETTER} ?\}}"
    rf"|(?<![A-Za-z\\])d{_LETTER} ?/ ?d{_LETTER}(?![A-Za-z])"
    rf"|{_LETTER} ?\( ?[-+]?[0-9]+(?:[./][0-9]+)? ?\))"
    r"|\\[A-Za-z]+(?:[\^_](?:\{[^{}]*\}|\w))*|\^[A-Za-z]"
)
_ARGUMENT = re.compile(  # \sin x · y is (\sin x) · y, which the parser would not see
    rf"(\\(?:{FUNCTIONS})(?![A-Za-z])(?:[\^_](?:\{{[^{{}}]*\}}|\w))*) ?"
    rf"((?:[0-9.A-Za-zπ]|\\(?:{GREEK})|\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|\\sqrt\{{[^{{}}]*\}}"
    r"|\^(?:\w|\{[^{}]*\}))+) ?(?=·)"
)
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?°")
_LATEX = {"π": r"\pi ", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty "}


@lru_cache(maxsize=4096)
def latex(text: str) -> str | None:
    """The normalised text of an expression or relation for the parser; None if it is neither."""
    text = _TOWER.sub(_power, text) if text.count("^") > 1 else text
    if text.count("|") % 2 or _REFUSED.search(text) or not re.search(r"\w|[π∞]", text):
        return None
    text = _VALUE.sub(lambda found: _name(found["value"]) if found["value"] else found[0], text)
    # 2 \frac{1}{2} is a sum, but 2(1/2) is a product, which has to be written.
    text = re.sub(r"(?<![\w.}^])([0-9]+) ?(\\frac\{[0-9]+\}\{[0-9]+\})", r"(\1+\2)", text)
    text = re.sub(r"(?<![\w.}^)])([0-9]+)/([0-9]+)(?![0-9.^!])", r"\\frac{\1}{\2}", text)
    text = _DEGREES.sub(r"(\1·π/180)", text) if "°" in text else text
    text = _ARGUMENT.sub(r"\1(\2)", text) if "·" in text else text
    written: list[str] = []
    at, value, depth = 0, False, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token.start() != at or depth > DEEPEST:
            return None
        at = token.end()
        if token[0] == " ":
            continue
        after = written[-1][-1:] if written else ""
        number = token["number"] and (after in (")", "}", "!") or after.isdigit())
        braced = token[0] == "{" and after.isdigit() and written[-1][0].isdigit()
        if value and (token[0] in ("(", "[", r"\frac", r"\binom") or number or braced):
            written.append(_LATEX["·"])
        written.append(_written(token))
        value = bool(token["number"]) or token[0] in ("π", ")", "}", "!")
        value = value or (token["letter"] is not None and token[0] not in "fghFG")
    return "".join(written) if at == len(text) else None


def _power(tower: re.Match[str]) -> str:
    """The exponent of 2^{3^2}, if it is a small one."""
    exponent = int(tower[1]) ** int(tower[2] or tower[3])
    return f"^{{{exponent}}}" if exponent < 10**5 else tower[0]


def _written(token: re.Match[str]) -> str:
    """The parser takes R for r, E for e, γ for Euler's constant and x^T for a transpose."""
    name = token["greek"] or token["letter"]
    small = name is not None and len(name) == 1 and name.islower()
    if name and not small:
        return _name(name)
    return _LATEX.get(token[0]) or token[0] + " " * (token[0][0] == "\\")


def _name(text: str) -> str:
    """A variable for a letter, for a derivative, or for the value P(0), which is no product."""
    codes = (f"{ord(sign):03d}" for sign in re.sub("[{} ]", "", text))
    return f"q_{{{''.join(codes)}}}"
