"""What a normalised answer is: something with parts, an equation, words, or a choice."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from burnish.graders.answers.spelling import BRACKETS, COMMA, GREEK, closes, cut, normalise

_STRUCTURE = re.compile(r"[,;()\[⦃∪±∓<>≤≥]|\\begin| and | or ")
_UNION = re.compile(rf"{BRACKETS}|∪")
_EQUALS = re.compile(rf"{BRACKETS}|[=∈]")
_ORDER = re.compile(rf"{BRACKETS}|[<>≤≥]")
_NAME = re.compile(
    rf"(?:[A-Za-z]|[A-Z]{{2,3}}|[A-Za-z]{{4,}}(?: [A-Za-z]+)*|\\(?:{GREEK})|m? ?\\angle ?[A-Z]+)"
    r"(?:_(?:\w|\{\w+\}))?(?:\([A-Za-z](?:, ?[A-Za-z])*\))?|\([A-Za-z](?:, ?[A-Za-z])+\)"
)
_LEFT = re.compile(  # what else may be said to equal something
    r"[A-Za-z]'+|[A-Z]\^(?:\{-1\}|T)"
    r"|\\frac\{\\partial [A-Za-z]\}\{\\partial [A-Za-z]\}|[A-Za-z]_\{\\(?:min|max)\}"
    r"|[A-Za-z](?:'+|\^\{-1\})?\([A-Za-z0-9](?:, ?[A-Za-z0-9])*\)|\|[A-Za-z]+\||\[[A-Z]+\]"
    r"|\\(?:vec|overline|hat) ?\{?[A-Za-z]+\}?|\\frac\{d[A-Za-z]\}\{d[A-Za-z]\}"
)
TOTAL = re.compile(r"[A-Za-z](?: ?[-+] ?[A-Za-z])+|\\frac\{[A-Z]{1,2}\}\{[A-Z]{1,2}\}")
"""What a question may ask for, and then an answer may say to equal something: m + n = 7. As a gold
answer that is an equation."""
_MATRIX = re.compile(
    r"(?P<factor>[^=,<>≤≥∈\[(]*)[\[(]? ?"
    r"\\begin\{(?:[pbB]?matrix|smallmatrix|array\}(?:\{[lcr| ]*)?)\}(?P<body>.*)"
    r"\\end\{\w+\} ?[\])]?",
    re.DOTALL,
)
_CHOICE = re.compile(r"(?:(?:option|choice) )?\(?([A-J])[).:]*", re.IGNORECASE)
_CHOICE_AND_MORE = re.compile(
    r"\(?([A-J])[).:]+ ?(?!.*\b[A-K]\b|.*\([a-k]\)|[a-j]$)"
    r"((?!.*\b(?:or|not|no|false|wrong|incorrect)\b).*)"
)
_NO_WORDS = re.compile(  # signs that mean something: a prime, a factorial, an arrow, a minus
    r"[\\^=<>≤≥≠+·{}\[\]|π∞±∪/%$_⦃#~]|^!|\b[A-Za-z]['′″]|[0-9]!|[^\x00-\x7f\w\s’‘“”…]"
    r"|(?:^|[\s(\[])-|-(?=[0-9])"
)
_SYNONYMS = {"dne": "does not exist", "no solutions": "no solution"}


class Parts(NamedTuple):
    kind: str
    """Its brackets; "list"; "or", "and" of conditions; of a matrix, the lengths of its rows."""
    items: tuple[str, ...]
    name: str = ""
    """The variables, where an inequality describes an interval, equations a tuple, or conditions
    are on several."""


def parts(text: str) -> Parts | None:
    """What a list, set, tuple, interval, union, matrix or inequality is made of."""
    if not _STRUCTURE.search(text):
        return None
    matrix = _MATRIX.fullmatch(text)
    product = matrix and re.fullmatch("-?[^-+]*", matrix["factor"].strip())
    if matrix and product and "\\begin" not in matrix["body"]:
        body = re.sub(r"(?: |\\\\)*$", "", matrix["body"])
        rows = [row.split("&") for row in body.split("\\\\")]
        kind = "×".join(str(len(row)) for row in rows)
        factor = matrix["factor"].strip(" ·")
        cells = [normalise(cell) for row in rows for cell in row]
        if factor:
            cells = [
                f"{factor}({cell})" if factor == "-" else f"({factor})·({cell})" for cell in cells
            ]
        return Parts(kind, tuple(cells))
    pieces = cut(text, COMMA)
    if len(pieces) > 1 or (set("±∓") & set(text) and not closes(text)):
        return _several(text, pieces)
    pieces = cut(text, _UNION)
    if len(pieces) > 1:
        return Parts("or", tuple(pieces))
    if closes(text) and text[0] != "{" and "|" not in text:
        if "±" in text and text[0] != "⦃":
            return Parts("list", _both_signs(text))
        items = cut(text[1:-1], COMMA)
        kind = "()" if len(items) != 2 and text[0] != "⦃" else text[0] + text[-1]
        signed = tuple(sign for item in items for sign in _both_signs(item))
        return Parts(kind, signed) if len(items) > 1 or text[0] == "⦃" else None
    return _inequality(text)


def _several(text: str, pieces: list[str]) -> Parts:
    """A list; a set, if said with "and", "or" or "x ="; x = 1, y = 2 as (1, 2); conditions, and
    words with "or" between them."""
    named = [equation(piece) or ("", ()) for piece in pieces]
    names = [name for name, _ in named]
    size = len(set(names))
    again = names == names[:size] * (len(names) // size) and "" not in names
    if 1 < size < len(names) and again:  # one solution after another
        rounds = range(0, len(pieces), size)
        return Parts("⦃⦄", tuple(", ".join(pieces[i : i + size]) for i in rounds))
    if 1 < len(pieces) == len({name for name, _ in named} - {""}):
        if " or " in text:
            return Parts("or", tuple(pieces), ",".join(sorted(names)))
        values = sorted((name, values[-1]) for name, values in named)
        return Parts(
            "()", tuple(value for _, value in values), ",".join(name for name, _ in values)
        )
    stated = all(words(piece) is not None for piece in pieces) and " or " in text
    if stated or any(len(cut(piece, _ORDER)) > 1 for piece in pieces):
        of = {found.name for piece in pieces if (found := _inequality(piece))}
        name = ",".join(sorted(of)) if len(of) > 1 else ""
        return Parts("or" if " or " in text else "and", tuple(pieces), name)
    unordered = "=" in text or " or " in text or " and " in text
    signed = tuple(sign for piece in pieces for sign in _both_signs(piece))
    return Parts("⦃⦄" if unordered else "list", signed)


def _both_signs(text: str) -> tuple[str, ...]:
    text = text if "±" in text else text.replace("∓", "±")
    if "±" not in text or max(text.count("±"), text.count("∓")) > 1:  # which go together?
        return (text,)
    upper = text.replace("±", "+").replace("∓", "-").removeprefix("+")
    return upper, text.replace("±", "-").replace("∓", "+").removeprefix("+")


def _inequality(text: str) -> Parts | None:
    """a < x ≤ b, x > a and the like as the interval of x."""
    pieces = cut(text, _ORDER)
    signs = "".join(re.findall("[<>≤≥]", text))
    if len(pieces) != len(signs) + 1 or len(pieces) not in (2, 3):
        return None
    if signs[0] in ">≥":
        pieces, signs = pieces[::-1], signs[::-1].translate(str.maketrans(">≥", "<≤"))
    if set(signs) - set("<≤"):
        return None
    if len(pieces) == 2:
        named = _NAME.fullmatch(pieces[0])
        pieces, signs = (["-∞", *pieces], "<" + signs) if named else ([*pieces, "∞"], signs + "<")
    low, name, high = pieces
    if not _NAME.fullmatch(name):
        return None
    return Parts("(["[signs[0] == "≤"] + ")]"[signs[1] == "≤"], (low, high), name)


def equation(text: str) -> tuple[str, tuple[str, ...]] | None:
    """A name, which may be missing, and all that is said to equal it; None for other text.

    x = 2 + 3 = 5 names x, and so does x ∈ (0, 1); 2 + 3 = 5 has no name; 1/3 ≈ 0.3 says 1/3.
    """
    if not set("=≈∈") & set(text):
        return None
    exact, about, _ = text.partition("≈")
    if about and exact.strip() and not _NAME.fullmatch(exact.strip()):
        text = exact.strip()
    sides = cut(text.replace("≈", "="), _EQUALS)
    if len(sides) < 2:
        return ("", (text,)) if about else None
    if "∈" in text and not re.match(r"[\[(⦃∅ℝ]", sides[-1]):
        return None
    if _NAME.fullmatch(sides[-1]) and not _NAME.fullmatch(sides[0]):
        sides.reverse()
    name, *values = sides
    letters = set(re.sub(r"\\(?:begin|end)\{\w+\}|\\(?:frac|sqrt|binom)", "", " ".join(values)))
    named = _NAME.fullmatch(name) or _LEFT.fullmatch(name)
    if name == "" or (named and not (len(name) == 1 and name in letters)):
        return name, tuple(values)
    if TOTAL.fullmatch(name) and letters.isdisjoint(re.findall("[A-Za-z]", name)):
        return name, tuple(values)
    calculation = not re.search("[A-Za-z]", re.sub(r"\\(?:frac|sqrt|binom)", "", text))
    return ("", tuple(sides)) if calculation else None


@lru_cache(maxsize=4096)
def words(text: str) -> str | None:
    """The words of a text answer, case and punctuation aside; None for anything else.

    Two letters that are no name stay as they are: a segment AB is not a product ab.
    """
    if _NO_WORDS.search(text):
        return None
    short = 3 if re.search("[0-9]", text) else 1
    alone = re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", text) is not None
    said = re.findall(r"[^\W_]+", text)
    if not any(_is_word(word, alone=alone) and len(word) > short for word in said):
        return None
    if len(text) == 2 and not text.istitle() and may_be_product(text.lower()):
        return text
    found = re.findall(r"(?<!\w)\.[0-9]+|[0-9]+(?:[.:,][0-9]+)+|[^\W_]+", text.casefold())
    article = found[0] in ("the", "a", "an") and len(found) > 1
    plain = " ".join(found[article:])
    return _SYNONYMS.get(plain, plain)


def _is_word(text: str, *, alone: bool) -> bool:
    """Letters, but not consonants alone, which are variables: xyz. Two or three small letters are a
    word only where nothing but letters stands around: cat, but not a-bi."""
    spoken = re.fullmatch("[b-df-hj-np-tv-z]+", text.casefold()) is None
    known = alone or not may_be_product(text)
    return text.isalpha() and spoken and known and text not in ("and", "or")


def may_be_product(text: str) -> bool:
    """Whether a word may as well be a product of variables: ab, or aR."""
    short = len(text) < 4 and not text.istitle() and not text.isupper()
    return short and text.isascii() and text.isalpha()


def choice(text: str, *, gold: bool) -> str | None:
    """The letter of A, (A), "A." or, in a response, "(A) 5"; a gold letter is a capital."""
    found = _CHOICE.fullmatch(text)
    if found is None and not gold:
        found = _CHOICE_AND_MORE.fullmatch(text)
    return None if found is None or (gold and found[1].islower()) else found[1].upper()


def well_formed(text: str) -> bool:
    """Whether a normalised text has all its brackets and arguments and is no loose end."""
    if not re.search(r"[^\W_]|[∅∞π…]", text) or text.count(r"\begin") != text.count(r"\end"):
        return False
    if re.search(r"\\frac ?\{[^{}]*\}\{[-+]?0+\.?0*\}", text):
        return False
    text = re.sub(r"\\(?:begin|end)\{\w+\}", "", text)
    for _ in range(32):
        text, changed = re.subn(r"\{([^{}]*)\}", lambda m: "◻" if _whole(m[1]) else "�", text)
        if not changed:
            break
    opened = [text.count(c) for c in "([⦃"]
    closed = [text.count(c) for c in ")]⦄"]
    return sum(opened) == sum(closed) and opened[2] == closed[2] and _whole(text)


def _whole(text: str) -> bool:
    """No argument, operand or bracket is missing; nothing is divided by zero."""
    return text.strip() != "" and not re.search(
        r"[{}�]|\\(?:frac|binom)(?! ?◻◻)|\\sqrt(?! ?(?:\[[^\]]*\])?◻)|[\^_](?![\w◻\\∞π*+'-])"
        r"|^ ?[·/^_=≤≥<>,;)]|[-+·/^_=≤≥<>±,;(] ?$|/ ?0+(?![.0-9])|[-+·/=(] ?[·/=]",
        text,
    )
