"""One spelling for the many ways in which LaTeX, Unicode and plain text write an answer.

In it the usual signs are single characters (π ∞ ± ∪ ≤ ≥ ≠ · °), sets have the braces ⦃⦄, thousands
have no separators, text has no font. Nothing is evaluated, and the time is bounded by the length.
"""

from __future__ import annotations

import re
from functools import lru_cache

from burnish.graders import extract

Rules = list[tuple[str, re.Pattern[str], str]]
"""Where the first is found in a text, the second becomes the third."""


def _rules(*rows: tuple[str, str, str]) -> Rules:
    return [(trigger, re.compile(pattern), to) for trigger, pattern, to in rows]


def _rewritten(text: str, rules: Rules) -> str:
    for trigger, pattern, to in rules:
        if trigger in text:
            text = pattern.sub(to, text)
    return text


FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon"
    "|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|hbar|ell"
)
BRACKETS = r"[()\[\]{}⦃⦄]"
COMMA = re.compile(rf"{BRACKETS}|,? (?:and|or) |[,;] ?(?:(?:and|or) )?")
_SIGNS = r"""· cdot times; / div; ≤ le leq leqslant; ≥ ge geq geqslant; ≠ ne neq; < lt; > gt;
    ∞ infty; ± pm; ∓ mp; ∪ cup bigcup; π pi; ° circ degree; ∅ emptyset varnothing; ∈ in;
    … ldots dots cdots; ≈ approx; : colon; ( langle; ) rangle; ⦃ lbrace; ⦄ rbrace;
    | lvert rvert mid; \frac dfrac tfrac cfrac nicefrac sfrac; \binom dbinom tbinom; \phi varphi;
    \epsilon varepsilon; £ pounds; ¤ textdollar"""
_COMMANDS = {name: row.split()[0] for row in _SIGNS.split(";") for name in row.split()[1:]}
_COMMANDS |= {"quad": " ", "qquad": " "}
_COMMANDS |= dict.fromkeys(("displaystyle", "left", "right", "big", "Big", "bigl", "bigr"), "")
_ESCAPES = {"{": "⦃", "}": "⦄", "$": "¤", "\\": r"\\", "!": ""} | {sign: sign for sign in "|%&#_"}
_UNICODE = dict(zip("−–—×⋅÷⁄，（）\u00a0\u202f\u2009", "---··//,()   ", strict=True))
_UNICODE |= {"√": r"\sqrt ", "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4"}
_UNICODE |= {chr(0xFF10 + digit): str(digit) for digit in range(10)}
_UNICODE |= {chr(0x2080 + digit): f"_{digit}" for digit in range(10)}
_UNICODE |= {"ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda "}
_TRANSLATION = str.maketrans(_UNICODE)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_UNIT = re.compile(
    r"(?:(?<=[0-9)}])|(?<=\\pi))(?:\\[,;: ]|[ ~])*"
    r"\\(?:text|mathrm|textrm) ?\{ ?([msghLJNVWK]) ?\}"
)
_UNITS = {"m": "meter", "s": "second", "g": "gram", "h": "hour", "L": "liter"}
_UNITS |= {"J": "joule", "N": "newton", "V": "volt", "W": "watt", "K": "kelvin"}
"""Letters that stand for a unit only where they are text: 2π m may have a variable."""
_TEXT = re.compile(
    r"\\(?:(?:text|math)[a-z]{0,4}|[mh]box|operatorname|bold(?:symbol)?|emph|underline)"
    r"\*?\s*\{([^{}]*)\}"
)
_BEFORE = _rules(
    (",", r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3}(?![0-9]))", ""),
    ("quad", r"(?<=[0-9])\s*\\q?quad\s*(?=[0-9])", ", "),
    ("mathbb", r"\\mathbb\s*\{?\s*([RNZQC])\s*\}?", r" ℝ\1 "),
    ("color", r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    ("space", r"\\[hv]space\*?\s*\{[^{}]*\}", ""),
    ("[", r"\\\\\s*\[[0-9.]+ ?(?:pt|em|ex|mm|cm)\]", r"\\\\"),
    (":", r"\\text\{:\}|\{:\}", ":"),
    ("choose", r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
    ("over", r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
)
_CASES = re.compile(r"\\begin\{cases\}([^&]*)\\end\{cases\}")
_COMMAND = re.compile(r"\\([A-Za-z]+)|\\(.)", re.DOTALL)
_CHANGED = (
    "(?:not|never|or|nor|no|than|minus|negative|plus|times|over|half|twice|double|wrong|incorrect)"
    r"\b"
)
"""The number that follows such a word is not, or is not alone, the answer."""
_OTHERWISE = re.compile(rf"\b{_CHANGED}|n't", re.IGNORECASE)
_THEN = "(?:so|thus|hence|therefore),? "
_PREFIX = re.compile(
    rf"^(?:{_THEN})?(?:the )?(?:final )?answer ?(?:is|:|=)[: ]*|^#### ?"
    rf"|^(?:(?:{_THEN})?the (?:(?!{_CHANGED}|answer )[a-z]+ ){{1,2}}(?:is|are|equals):? |{_THEN})"
    r"(?=[-+$\\(0-9]|[a-z] ?=)",
    re.IGNORECASE,
)
_ANNOUNCES = re.compile(r"(?:^|:|(?<![\\A-Za-z])[A-Za-z]{2,}[,.]?|[A-Za-z)]\.)$")
_COMMENT = re.compile(r"[\s$]*(?:is|are|was|were)\b[A-Za-z ,.'’]*", re.IGNORECASE)
_MOST_BOXES = 8
_NAMES = ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp")
_NAMED = re.compile(rf"(?<![\\A-Za-z])(sqrt|{FUNCTIONS})(?![A-Za-z]|[ .]*(?:$|/))")
_AFTER = _rules(
    ("...", r"\.\.\.+", "…"),
    (" to ", r"^([0-9]+) to ([0-9]+)$", r"\1:\2"),
    ("\\", r"(?<=\.)([0-9]*)\\(?:bar|dot) ?\{?([0-9]+)\}?", r"\1\\overline{\2}"),
    (":", r"(?<=[0-9]) ?[aA]\.?[mM]\.?$", " am"),
    (":", r"(?<=[0-9]) ?[pP]\.?[mM]\.?$", " pm"),
    ("USD", r"^USD ?", "$"),
    ("pmod", r"\\pmod ?(\w)", r"\\pmod{\1}"),
    (")_", r"^\(([0-9A-F]+)\)_", r"\1_"),
    ("_{", r"_\{ ?\(([0-9]+)\) ?\}", r"_{\1}"),
    ("**", r"\*\*", "^"),
    ("*", r"\*", "·"),
    ("<=", r"<=", "≤"),
    (">=", r">=", "≥"),
    ("!=", r"!=", "≠"),
    ("°", r"\^ ?\{? ?° ?\}?", "°"),
    ("pi", r"(?<![\\A-Za-z])pi(?![A-Za-z])", "π"),
    ("inf", r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])", "∞"),
    ("\\sqrt", r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    ("\\sqrt", r"\\sqrt ?([0-9]+|[A-Za-zπ])", r"\\sqrt{\1}"),
    ("\\frac", r"\\frac ?([0-9A-Za-zπ])", r"\\frac{\1}"),
    ("\\frac", r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-zπ])", r"\1{\2}"),
    ("^", r"\^ ?\(([^()]*)\)", r"^{\1}"),
    ("^", r"\^ ?(-(?:[0-9]+|[A-Za-z]))", r"^{\1}"),
    ("{", r"([\^_]) ?\{ ?(\w) ?\}(?![0-9.])", r"\1\2"),
    ("} {", r"\} \{", "}{"),
    (" ", r" (?=[\^%])|(?<=[\[({⦃]) | (?=[\])}⦄,;])", ""),
)
_PLAIN = re.compile(
    r"[-+]?\$?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]+)?|[-+]?[0-9]+/[0-9]+"
    r"|[-+]?\\[dt]?frac\{[-+]?[0-9]+\}\{[0-9]+\}"
)
_SPACED = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9]| ?/)")
_THOUSANDS = re.compile(r"(?<![0-9.^])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")


@lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    """One way of writing it; a box is opened, and "the answer is" goes."""
    if _PLAIN.fullmatch(text):
        return text.replace(",", "").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    if "\\boxed" in text or "\\fbox" in text:
        text = _unboxed(text)
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
        text = text.translate(_TRANSLATION)
    if "\\" in text or "{,}" in text or "{:}" in text:
        text = _without_commands(text)
    text = (text if text.count("$") % 2 else text.replace("$", "")).replace("¤", "$")
    text = " ".join(text.rstrip("~").split())
    while len(text) > 1 and text[0] == text[-1] and text[0] in '*`"':
        text = text[1:-1].strip()
    if any(name in text for name in _NAMES):
        text = _NAMED.sub(r"\\\1", text)
    text = _PREFIX.sub("", _rewritten(text, _AFTER), count=1).lstrip(" ,;:").rstrip(" .,;:\\")
    if " " in text:
        text = _SPACED.sub(lambda m: m[0].replace(" ", ""), text)
    if "," in text and (", " in text or not set("([⦃") & set(text)):  # else coordinates
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    while text[:1] in ("(", "{") and closes(text):
        inside = text[1:-1].strip()
        if len(cut(inside, COMMA)) > 1:
            return f"⦃{inside}⦄" if text[0] == "{" else text
        text = inside
    return text


def _unboxed(text: str) -> str:
    """What is said around a box counts, -\\boxed{5} is -5, unless it announces what is in it."""
    for _ in range(_MOST_BOXES):
        found = extract.last_box(text)
        if found is None:
            break
        begin, inside, end = found
        lead, after = text[:begin].strip(" \n$"), text[end:]
        if _COMMENT.fullmatch(after) and not _OTHERWISE.search(after):
            after = ""
        if _ANNOUNCES.search(lead) and not _OTHERWISE.search(lead):
            lead, after = "", after.lstrip("$ ")
        text = f"{lead} {inside} {after}"
    return text


def _without_commands(text: str) -> str:
    """LaTeX's spacing, sizes, fonts and names of signs become spaces, nothing, words and signs."""
    text = _rewritten(text, _BEFORE)
    if "{cases}" in text:
        text = _CASES.sub(lambda m: m[1].strip().removesuffix("\\\\").replace("\\\\", ", "), text)
    text = text.replace("\\times", "⨯") if "\\vec" in text else text
    text = _UNIT.sub(lambda m: f" {_UNITS[m[1]]} ", text)
    for _ in range(3):
        text, found = _TEXT.subn(r" \1 ", text) if "{" in text else (text, 0)
        if not found:
            break
    return _COMMAND.sub(_command, text)


def _command(match: re.Match[str]) -> str:
    if match[1]:
        return _COMMANDS.get(match[1], match[0])
    return _ESCAPES.get(match[2], match[2] if match[2] in "+-=^<>/*" else " ")


def closes(text: str) -> bool:
    """Whether the bracket that opens the text is closed by its last character."""
    depth = 0
    for bracket in re.finditer(BRACKETS, text):
        depth += 1 if bracket[0] in "([{⦃" else -1
        if depth <= 0:
            return bracket.end() == len(text) and text[0] in "([{⦃"
    return False


def cut(text: str, separators: re.Pattern[str]) -> list[str]:
    """The text between separators that stand outside all brackets."""
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
    """Without spaces, but two numbers stay two."""
    return re.sub(r"(?<![0-9.]) | (?![0-9.])", "", text) if " " in text else text
