"""One spelling for the many ways in which LaTeX, Unicode and plain text write an answer.

In it the usual signs are single characters (π ∞ ± ∪ ≤ ≥ ≠ · °), sets have the braces ⦃⦄, thousands
have no separators, text has no font. Nothing is evaluated, and the time is bounded by the length.
"""

from __future__ import annotations

import re
from functools import lru_cache

from burnish.graders import extract

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
BRACKETS = r"[()\[\]{}⦃⦄]"
COMMA = re.compile(rf"{BRACKETS}|,? (?:and|or) |[,;] ?(?:(?:and|or) )?")
_SIGNS = r"""· cdot times ast; / div; ≤ le leq leqslant; ≥ ge geq geqslant; ≠ ne neq; < lt; > gt;
    ∞ infty; ± pm; ∓ mp; ∪ cup bigcup; π pi; ° circ degree; ∅ emptyset varnothing; ∈ in;
    … ldots dots cdots; ≈ approx; : colon; ( langle; ) rangle; ⦃ lbrace; ⦄ rbrace; [ lbrack;
    ] rbrack; | lvert rvert vert mid; \frac dfrac tfrac cfrac nicefrac sfrac;
    \binom dbinom tbinom; \phi varphi; \epsilon varepsilon; £ pounds; ¤ textdollar"""
_SILENT = "displaystyle left right big Big bigg Bigg bigl bigr rm bf"
_COMMANDS = {name: row.split()[0] for row in _SIGNS.split(";") for name in row.split()[1:]}
_COMMANDS |= {"quad": " ", "qquad": " "}
_COMMANDS |= dict.fromkeys(_SILENT.split(), "")
_ESCAPES = {"{": "⦃", "}": "⦄", "$": "¤", "\\": r"\\"} | {sign: sign for sign in "|%&#_"}
_ESCAPES |= dict.fromkeys("!()[]", "")
_UNICODE = dict(zip("−–—‑‒﹣×⋅∙÷⁄⩽⩾，（）\u00a0\u202f\u2009", "------···//≤≥,()   ", strict=True))
_UNICODE |= {"√": r"\sqrt ", "½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4"}
_UNICODE |= {chr(0xFF10 + digit): str(digit) for digit in range(10)} | {"\u200b": "", "\ufeff": ""}
_UNICODE |= {"ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda "}
_UNICODE |= {chr(0x2080 + digit): f"_{digit}" for digit in range(10)}
_TRANSLATION = str.maketrans(_UNICODE)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SEPARATORS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,|\\ )(?=[0-9]{3}(?![0-9]))")
_INVISIBLE = re.compile(r"\\(?:left|right)\s*\.")
_BLACKBOARD = re.compile(r"\\mathbb\s*\{?\s*([RNZQC])\s*\}?")
_SPACE = re.compile(r"\\(?:(?:text)?color|[hv]space)\*?\s*\{[^{}]*\}")
_ROW = re.compile(r"\\\\\s*\[[0-9.]+ ?(?:pt|em|ex|mm|cm)\]")
_CASES = re.compile(r"\\begin\{cases\}([^&]*)\\end\{cases\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose([^{}]*)\}")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_FONTS = "rm|bf|it|sf|tt|md|up|sc|sl|cal|frak|scr|normal"
_TEXT = re.compile(
    rf"\\(?:(?:text|math)(?:{_FONTS})?|[mh]box|operatorname|bold(?:symbol)?|emph|underline)"
    r"\*?\s*\{([^{}]*)\}"
)
_FAR = re.compile(r"(?<=[0-9])\s*\\q?quad\s*(?=[0-9])")
_UNIT = re.compile(
    r"(?:(?<=[0-9)}])|(?<=\\pi))(?:\\[,;: ]|[ ~])*"
    r"\\(?:text|mathrm|textrm) ?\{ ?([msghLJNVWK]) ?\}"
)
_UNITS = {"m": "meter", "s": "second", "g": "gram", "h": "hour", "L": "liter"}
_UNITS |= {"J": "joule", "N": "newton", "V": "volt", "W": "watt", "K": "kelvin"}
"""Letters that stand for a unit only where they are text: 2π m may have a variable."""
_COMMAND = re.compile(r"\\([A-Za-z]+)|\\(.)", re.DOTALL)
_THEN = "(?:so|thus|hence|therefore),? "
_CHANGED = (
    "(?:not|never|or|nor|no|than|minus|negative|plus|times|over|half|twice|double|wrong|incorrect)"
    r"\b"
)
"""What follows is not, or is not alone, the answer."""
_OTHERWISE = re.compile(rf"\b{_CHANGED}|n't", re.IGNORECASE)
_PREFIX = re.compile(
    rf"^(?:{_THEN})?(?:the )?(?:final )?answer ?(?:is|:|=)[: ]*|^#### ?"
    rf"|^(?:(?:{_THEN})?the (?:(?!{_CHANGED}|answer )[a-z]+ ){{1,2}}(?:is|are|equals):? |{_THEN})"
    r"(?=[-+$\\(0-9]|[a-z] ?=)",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"[.;,\n]")
_ANNOUNCES = re.compile(
    r"(?:\b(?:is|are|be|equals|gets?|gives?|has|have|obtain|answer|so|thus|hence|therefore)|:)$",
    re.IGNORECASE,
)
_PROSE = re.compile(r"[A-Za-z ,.'’$\n]*[A-Za-z]{2},?")
_COMMENT = re.compile(r"[\s$]*(?:is|are|was|were|in|altogether)\b[A-Za-z ,.'’]*", re.IGNORECASE)
_TIE = re.compile("~(?![A-Za-z])|(?<=.)~")
_MOST_BOXES = 8
_NAMES = ("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp")
_NAMED = re.compile(rf"(?<![\\A-Za-z])(sqrt|{FUNCTIONS})(?![A-Za-z]|[ .]*(?:$|/))")
_AFTER = [  # where the first is found, the second becomes the third
    (trigger, re.compile(pattern), to)
    for trigger, pattern, to in [
        ("...", r"\.\.\.+", "…"),
        (" to ", r"^([0-9]+) to ([0-9]+)$", r"\1:\2"),
        (": ", r"(?<=[0-9]) ?: ?(?=[0-9])", ":"),
        ("\\", r"(?<=\.)([0-9]*)\\(?:bar|dot) ?\{?([0-9]+)\}?", r"\1\\overline{\2}"),
        (".", r"(?<![A-Za-z])([aApP])\.[mM]\.?(?![A-Za-z])", r"\1m"),
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
        ("+", r"(?:^|(?<=[(\[,;<≤=] )|(?<=[(\[,;<≤=]))\+ ?(?=∞)", ""),
        ("\\sqrt", r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        ("\\sqrt", r"\\sqrt ?([0-9]+|[A-Za-zπ])", r"\\sqrt{\1}"),
        ("\\frac", r"\\frac ?([0-9A-Za-zπ])", r"\\frac{\1}"),
        ("\\frac", r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-zπ])", r"\1{\2}"),
        ("^", r"\^ ?\(([^()]*)\)", r"^{\1}"),
        ("^", r"\^ ?(-(?:[0-9]+|[A-Za-z]))", r"^{\1}"),
        ("{", r"([\^_]) ?\{ ?(\w) ?\}(?![0-9.])", r"\1\2"),
        ("} {", r"\} \{", "}{"),
        (" ", r" (?=[\^%])|(?<=[\[({⦃]) | (?=[\])}⦄,;])", ""),
    ]
]
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
    text = " ".join(_TIE.sub(" ", text).split())
    while len(text) > 1 and text[0] == text[-1] and text[0] in '*`"':
        text = text[1:-1].strip()
    if any(name in text for name in _NAMES):
        text = _NAMED.sub(r"\\\1", text)
    for trigger, pattern, to in _AFTER:
        if trigger in text:
            text = pattern.sub(to, text)
    text = _PREFIX.sub("", text, count=1).lstrip(" ,;:").rstrip(" .,;:\\")
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
        announced, after = _announces(text[:begin]), text[end:]
        if _COMMENT.fullmatch(after) and not _OTHERWISE.search(after):
            after = ""
        after = after.lstrip("$ ") if announced else after
        text = f"{'' if announced else text[:begin]} {inside} {after}"
    return text


def _announces(lead: str) -> bool:
    """Whether what stands before a box does no more: nothing, a sentence of its own, prose."""
    lead = lead.strip(" \n$")
    if not lead or re.search(r"[A-Za-z)]\.$", lead):
        return True
    if _ANNOUNCES.search(lead):
        return not _OTHERWISE.search(_SENTENCES.split(lead)[-1])
    return _PROSE.fullmatch(lead) is not None and not _OTHERWISE.search(lead)


def _without_commands(text: str) -> str:
    """LaTeX's spacing, sizes, fonts and names of signs become spaces, nothing, words and signs."""
    text = _FAR.sub(", ", _INVISIBLE.sub("", _SEPARATORS.sub("", text)))
    if "\\mathbb" in text:
        text = _BLACKBOARD.sub(r" ℝ\1 ", text)
    text = _ROW.sub(r"\\\\", _SPACE.sub("", text)).replace(r"\text{:}", ":").replace("{:}", ":")
    if "{cases}" in text:
        text = _CASES.sub(lambda m: m[1].strip().removesuffix("\\\\").replace("\\\\", ", "), text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text) if "choose" in text else text
    text = _OVER.sub(r"\\frac{\1}{\2}", text) if "\\over" in text else text
    text = text.replace("\\times", "⨯") if "\\vec" in text else text
    text = _UNIT.sub(lambda m: f" {_UNITS[m[1]]} ", text)
    for _ in range(3 if "{" in text else 0):
        text, found = _TEXT.subn(r" \1 ", text)
        if not found or "{" not in text:
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
