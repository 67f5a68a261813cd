"""Exact parsing of quantities in answers, at a bounded cost.

A value is a fraction, never a float: 0.333 is not 1/3, and 1e-9 is not 0. A repeating decimal is
read as a fraction if a bar marks its period, or if dots follow a period that is written three
times. A percentage is a hundredth: 50% is 0.5 and not 50 (a gold answer may be a list of both). A
unit matters only if both sides have one: 5 cm equals 5, but not 5 m. Texts must be normalised by
``spelling.normalise``.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_REPEATING = r"[0-9]*\.[0-9]*(?:\\overline\{[0-9]+\}|…)"
_LONGEST_PERIOD = 12
"""Largest number of digits of a period before dots; a longer period needs a bar."""
_FRACTION = re.compile(rf"\\frac\{{(-?{_DECIMAL})\}}\{{(-?{_DECIMAL})\}}")
_POWER_OF_TEN = re.compile(r"\s*[·x]\s*10\^\{?(-?[0-9]{1,4})\}?")
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?P<currency>[$€£]|USD|) ?(?:(?P<whole>[0-9]+) +(?=[1-9]))?"
    rf"(?:(?P<top>-?{_DECIMAL}(?:[eE][-+]?[0-9]{{1,4}})?)(?: ?/ ?(?P<bottom>-?{_DECIMAL}))?"
    rf"|(?P<repeating>{_REPEATING})) ?(?P<percent>%|(?i:percent|pct))?"
)
_UNITS = """mm millimeter; cm centimeter; m meter; km kilometer; in inch inches; ft foot feet;
    yard; mi mile; g gm gms gram; kg kilogram; oz ounce; lb lbs pound; ml mL milliliter; l L liter;
    cup; unit; s sec second; min minute; h hr hrs hour; day; week; month; year; mi/h mph;
    km/h kph kmph; dollar $ usd USD; euro €; £; cent ¢; ° degree; radian; Hz; Pa; eV; nm; people;
    children"""
_KNOWN = {name: names.split()[0] for names in _UNITS.split(";") for name in names.split()}
_WITH_UNIT = re.compile(
    r"(?P<core>.*[0-9.)}π])(?P<space> ?)(?P<power>(?:square |cubic )?)(?P<name>[A-Za-z]+|[°¢])\.?"
    r"(?P<exponent>(?:\^[23])?)"
)
_RATE = re.compile(r"(?P<amount>.*[^ ])(?P<sign> per | ?/ ?)(?P<per>[A-Za-z]+)(?P<power>(?:\^2)?)")
_PART_OF_ONE = re.compile(
    ".*(?:four|fif|six|seven|eigh|nin|ten|twelf|teen|tie|hundred|sand|lion)ths"
    "|thirds|halves|quarters|tens|dozens|sixes|percents|hundreds|thousands|.*illions"
)
"""Plurals that are not units, because they change the number before them: fifths, dozens."""


class Quantity(NamedTuple):
    """A number or another expression, split from its unit."""

    core: str
    """The text without its unit."""
    value: Fraction | None
    """Exact value; None if the core is not a number."""
    unit: str
    """Canonical name of the unit; empty if there is none."""

    def same_unit(self, other: Quantity) -> bool:
        """Return whether the units are equal, or at least one of the quantities has none."""
        return not self.unit or not other.unit or self.unit == other.unit


@lru_cache(maxsize=8192)
def quantity(text: str) -> Quantity:
    """Split a number or another expression from the unit after it or the currency before it, and
    parse the number.

    Any plural after a number and a space is a unit. Elsewhere only a known unit with at least two
    letters is, because m in x + 2 m may be a variable.
    """
    if "/" in text or " per " in text:
        return _rate(text) or _amount(text)
    return _amount(text)


def _amount(text: str) -> Quantity:
    """Parse a quantity whose unit, if it has one, is not a rate such as km/h."""
    value, currency = _number(text)
    found = _WITH_UNIT.fullmatch(text) if value is None else None
    if found is None:
        return Quantity(text, value, currency)
    value, currency = _number(found["core"])
    unit = _unit(found["name"], counted=value is not None and found["space"] != "")
    if unit is None or currency or (unit == "°" and value is None):  # sin 30° is not sin 30
        return Quantity(text, None, "")
    power = {"square ": "^2", "cubic ": "^3"}.get(found["power"], found["exponent"])
    return Quantity(found["core"], value, unit + power)


def _rate(text: str) -> Quantity | None:
    """Parse a rate, such as 45 miles per hour, 9.8 m/s^2 or $5 per day; None for other text. 5/h is
    not a rate, because 5 has no unit."""
    found = _RATE.fullmatch(text)
    if found is None:
        return None
    amount, in_words = _amount(found["amount"]), found["sign"] == " per "
    per = _unit(found["per"], counted=True) or (found["per"] if in_words else "/")
    has_amount = amount.unit != "" or (in_words and amount.value is not None)
    if not has_amount or "/" in amount.unit + per:
        return None
    return Quantity(amount.core, amount.value, f"{amount.unit}/{per}{found['power']}")


def _number(text: str) -> tuple[Fraction | None, str]:
    """Return the exact value of the text and the canonical name of its currency. The value is None
    if the text is not a number; the name is empty if it has no currency."""
    if "\\" in text or "·" in text or "x" in text:
        text = _POWER_OF_TEN.sub(r"e\1", _FRACTION.sub(r" \1/\2", text)).strip()
    found = _NUMBER.fullmatch(text)
    if found is None or (found["whole"] and not found["bottom"]):
        return None, ""
    if found["repeating"]:
        value = _repeating(found["repeating"])
    else:
        top, bottom = Fraction(found["top"]), Fraction(found["bottom"] or 1)
        value = int(found["whole"] or 0) + top / bottom if bottom else None
    if value is None:
        return None, ""
    value = value / 100 if found["percent"] else value
    return -value if found["sign"] == "-" else value, _KNOWN.get(found["currency"], "")


def _repeating(text: str) -> Fraction | None:
    """Return the value of 0.1\\overline{6} or 0.1666…; None if no period is written three times
    before the dots."""
    digits, _, period = text.removesuffix("}").partition(r"\overline{")
    if not period:
        digits = digits.removesuffix("…")
        ends = (digits[-size:] for size in range(1, _LONGEST_PERIOD + 1))
        written = digits.partition(".")[2]
        period = next((end for end in ends if written.endswith(end * 3)), "")
    if not period:
        return None
    places = len(digits.partition(".")[2])
    return Fraction(f"{digits}0") + Fraction(int(period), (10 ** len(period) - 1) * 10**places)


def _unit(name: str, *, counted: bool) -> str | None:
    """Return the canonical name of a unit; None if ``name`` is not a unit.

    ``counted`` is true after a number and a space, and in a rate: only then are a single letter and
    any unknown plural units. The case of one or two letters matters: M is not m.
    """
    word = name if len(name) < 3 else name.lower()
    known = _KNOWN.get(word) or _KNOWN.get(word.removesuffix("s") if len(word) > 3 else word)
    may_be_product = name.isalpha() and (len(name) == 1 or name == "gm")
    if known and (counted or not may_be_product):
        return known
    plural = len(word) > 3 and word[-1] == "s" and not _PART_OF_ONE.fullmatch(word)
    return word if counted and plural else None
