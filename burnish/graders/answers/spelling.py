"""Normalisation of answers that are written in LaTeX, Unicode or plain text.

In normalised text, common symbols are single characters (π ∞ ± ∪ ≤ ≥ ≠ · °), sets have the braces
⦃⦄, numbers have no thousands separators, and fonts are removed. Nothing is evaluated, and the time
is bounded by the length.
"""

from __future__ import annotations

import re
from functools import lru_cache

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
BRACKETS = r"[()\[\]{}⦃⦄]"
COMMA = re.compile(rf"{BRACKETS}|,? and |[,;] ?(?:and )?")
_SIGNS = r"""· \cdot \times × *; ^ **; / \div; ≤ \le \leq \leqslant <=; ≥ \ge \geq \geqslant >=;
    ≠ \ne \neq !=; < \lt; > \gt; ∞ \infty; ± \pm; ∓ \mp; ∪ \cup \bigcup; π \pi; ° \circ \degree;
    ∅ \emptyset \varnothing; ∈ \in; … \ldots \dots \cdots; ( \langle; ) \rangle; - − –;
    ⦃ \lbrace \{; ⦄ \rbrace \}; | \lvert \rvert \mid \|; ≈ \approx; : \colon; £ \pounds;
    ¤ \textdollar \$; % \%; & \&; _ \_; \binom \dbinom \tbinom; \sqrt √;
    \frac \dfrac \tfrac \cfrac \nicefrac \sfrac"""
_SPELLINGS = {name: row.split()[0] for row in _SIGNS.split(";") for name in row.split()[1:]}
_SPELLINGS |= dict.fromkeys((r"\displaystyle", r"\left", r"\right", r"\boxed", r"\fbox", r"\!"), "")
_SPELLINGS |= {"½": " 1/2"} | {rf"\{mark}": " " for mark in " ,:()[]\n"} | {r"\;": " "}
_SPELLINGS |= {power: f"^{{{digit}}}" for digit, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_SIGN = re.compile(r"\\[A-Za-z]+|\\.|[<>!]=|(?<=[\w)} ])\*\*?(?=[\w(\\ -])|[^\x00-\x7f]", re.DOTALL)
_FONT = re.compile(
    r"\\(?:(?:text|math)(?!bb)[a-z]{0,3}|[mf]?box|boxed|operatorname|underline)\*?\s*\{([^{}]*)\}"
)
_GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|\s*,\s*(?:\\!\s*)+|\\,)(?=[0-9]{3}(?![0-9]))")
_DIGIT = r"(?:\{ ?([0-9]) ?\}|([0-9]))"
_PERIODS = [
    (re.compile(pattern), to)
    for pattern, to in (
        (rf"\\dot ?{_DIGIT}([0-9]*)\\dot ?{_DIGIT}", r"\\overline{\1\2\3\4\5}"),
        (r"\\(?:bar|dot|overline) ?(?:\{ ?([0-9]+) ?\}|([0-9]))", r"\\overline{\1\2}"),
        (r"(?<=[0-9]\.)\(([0-9]+)\)", r"\\overline{\1}"),
    )
]
r"""Rules that write the repeating digits of a decimal as \overline{6}. 0.(6) is one of the
notations; 0.1(6) is not, because it may be a product."""
_RULES = [
    (re.compile(pattern), to)
    for pattern, to in (
        (r'^([*`"]{1,2})(.*)\1$', r"\2"),
        ("^(?:#### ?|(?i:so|thus|hence|therefore),? )", ""),
        ("^(?i:(?:the )?(?:final )?answer) ?(?:is|:)[: ]*", ""),
        (r"^(?i:the) [a-z]+ (?:is|are) (?=[-+$\\(0-9]|[a-z] ?=)", ""),
        (r"(?<=[^A-Za-z ]) ?≈.*", ""),
        (r"\.\.\.+", "…"),
        (r"\\q?quad ?(or|and) ?\\q?quad", r" \1 "),
        (r"\\mathbb ?\{? ?R ?\}?|^(?i:all real numbers)$", "(-∞,∞)"),
        (r"\^ ?\{? ?° ?\}?", "°"),
        (r"^[a-z] ?∈ ?(?=[\[(⦃])", ""),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", "π"),
        (r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])", "∞"),
        (rf"(?<![\\A-Za-z])(sqrt|{FUNCTIONS})(?![A-Za-z]|[ .]*(?:$|/))", r"\\\1"),
        (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt ?([0-9]+|[A-Za-zπ])", r"\\sqrt{\1}"),
        (r"\\frac ?([0-9A-Za-zπ])", r"\\frac{\1}"),
        (r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-zπ])", r"\1{\2}"),
        (r"\^ ?(-(?:[0-9]+|[A-Za-z]))", r"^{\1}"),
        (r"([\^_]) ?\{ ?(\w) ?\}(?![0-9.])", r"\1\2"),
        (r" (?=[\^%])|(?<=[\[({⦃]) | (?=[\])}⦄,;])", ""),
    )
]
_CONDITION = re.compile(
    r"^([A-Za-z])(?: ?∈ ?\(-∞,∞\))? ?[|:] ?(?=[^|:]*[<>≤≥][^|:]*$)"
    r"(?=(?:.*[^A-Za-z\\])?\1(?![A-Za-z]))"
)
_PAIRS = ("()", "{}", "⦃⦄")
_PLAIN = re.compile(r"[-+]?\$?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
_THOUSANDS = re.compile(r"(?<![0-9.^])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")


@lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    """Return an answer in normalised notation, without boxes, fonts and phrases such as "the answer
    is"."""
    if _PLAIN.fullmatch(text):
        return text.replace(",", "")
    text = _GROUPED.sub("", text)
    for _ in range(3):
        text = _FONT.sub(r" \1 ", text)
    text = text.replace(r"\times", "⨯") if r"\vec" in text else text
    text = _SIGN.sub(lambda sign: _SPELLINGS.get(sign[0], sign[0]), text)
    text = (text if text.count("$") % 2 else text.replace("$", "")).replace("¤", "$")
    text = " ".join(text.split())
    for pattern, to in _RULES:
        text = pattern.sub(to, text)
    if "." in text and ("\\" in text or ".(" in text):
        for pattern, to in _PERIODS:
            text = pattern.sub(to, text)
    text = text.strip(" ,;:").rstrip(".")
    if ", " in text or not set("([⦃") & set(text):  # otherwise commas may separate coordinates
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    while text[:1] in ("(", "{", "⦃") and closes(text) and text[0] + text[-1] in _PAIRS:
        inside = text[1:-1].strip()
        if len(split_at(inside, COMMA)) > 1:
            return f"⦃{inside}⦄" if text[0] == "{" else text
        if text[0] == "⦃" and (not inside or set("⦃∅±") & set(inside)):
            return text
        text = _CONDITION.sub("", inside) if text[0] == "⦃" else inside
    return text


def closes(text: str) -> bool:
    """Return whether a single pair of brackets encloses the whole text: true for "(a)", false for
    "(a)(b)". The two brackets may be of different kinds, as in the interval "[1,2)"."""
    depth = 0
    for bracket in re.finditer(BRACKETS, text):
        depth += 1 if bracket[0] in "([{⦃" else -1
        if depth <= 0:
            return bracket.end() == len(text) and text[0] in "([{⦃"
    return False


def split_at(text: str, separators: re.Pattern[str]) -> list[str]:
    """Split a text at the separators that are outside all brackets. The pattern ``separators`` must
    also match the brackets."""
    pieces, depth, begin = [], 0, 0
    for found in separators.finditer(text):
        if found[0] in "([{⦃":
            depth += 1
        elif found[0] in ")]}⦄":
            depth -= 1
        elif depth == 0:
            pieces.append(text[begin : found.start()].strip())
            begin = found.end()
    return [*pieces, text[begin:].strip()]


def squeezed(text: str) -> str:
    """Return the text without spaces, except for spaces between numbers."""
    return re.sub(r"(?<![0-9.]) | (?![0-9.])", "", text)
