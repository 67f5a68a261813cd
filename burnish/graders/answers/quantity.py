"""Quantities as answers write them, read exactly and at a bounded cost.

A value is a ratio of integers, never a float: 0.333 is not 1/3, and 1e-9 is not 0. A percentage is
its hundredth and nothing else: 50% is 0.5, not 50 (a gold answer may be a list of both). A unit
counts only against another unit: 5 cm is 5, but not 5 m. Text comes from ``spelling.normalise``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

Ratio = tuple[int, int]
"""Numerator and denominator, not reduced: quicker to make and to compare than a Fraction."""

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_PATTERN = re.compile(
    rf"""(?P<sign>[-+]?\s*[$€£¥]?|[$€£¥]\s*[-+])\s*(?:
      (?:(?P<whole>[0-9]+)\s*)?\\frac\{{(?P<top>[-+]?{_DECIMAL})\}}\{{(?P<bottom>[-+]?{_DECIMAL})\}}
    | (?:(?P<whole_>[0-9]+)\s+)?(?P<top_>{_DECIMAL})\s*/\s*(?P<bottom_>{_DECIMAL})
    | (?P<decimal>{_DECIMAL})
      (?:[eE](?P<power>[-+]?[0-9]{{1,4}})|\s*[·x]\s*10\^\{{?(?P<power_>[-+]?[0-9]{{1,4}})\}}?)?
    | (?P<before>[0-9]*\.[0-9]*)\\overline\{{(?P<period>[0-9]+)\}}
    )(?:\s*(?P<scale>hundred|thousand|million|billion|trillion|dozen))?
    \s*(?P<percent>%|(?i:percent|pct))?""",
    re.VERBOSE,
)
_TERMS = ("top", "bottom")
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12, "dozen": 12}
_SPELLED = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen twenty"""
_SAID = {word: (value, 1) for value, word in enumerate(_SPELLED.split())}
_UNITS = """mm millimeter; cm centimeter; m meter; km kilometer; in inch inches; ft foot feet;
    yd yard; mi mile; mg milligram; g gram; kg kilogram; oz ounce; lb pound; ml milliliter; l liter;
    cup; ms millisecond; s sec second; min minute; h hr hour; day; mi/h mph; km/h; dollar $ usd;
    euro €; £; ¥ yen; cent ¢; ° degree; rad radian; joule; newton; volt; watt; kelvin; hz; pa; ev;
    nm; mol; people; children; men; women; unit"""
_CANONICAL = {name: names.split()[0] for names in _UNITS.split(";") for name in names.split()}
_MEASURES = """mm 1 cm 10 m 1000 km 1000000; in 1 ft 12 yd 36 mi 63360; mg 1 g 1000 kg 1000000;
    oz 1 lb 16; ml 1 l 1000; ms 1 s 1000 min 60000 h 3600000 day 86400000; cent 1 dollar 100"""
_SIZES = {
    unit: (measure, int(size))
    for measure in _MEASURES.split(";")
    for unit, size in zip(measure.split()[::2], measure.split()[1::2], strict=True)
}
"""The measure that a unit is of, and how many of the smallest one it is."""
_POWERS = {"square": "^2", "cubic": "^3"}
_PART_OF_ONE = re.compile(
    ".*(?:four|fif|six|seven|eigh|nin|ten|twelf|teen|tie|hundred|sand|lion)ths|thirds|halves|quarters"
)
_FILLERS = ("old", "total", "altogether")
_MEGA = re.compile("M.?")
"""A molar or a million of something: 5 M is not 5 m."""
_PART = re.compile(r"(?P<name>[A-Za-z]+\.?|[°$€£¥¢])(?:\^\{?(?P<power>[23])\}?)?|/|\s")
_ATTACHED = re.compile(r"(.*[0-9.})π%])([A-Za-z°$€£¥¢][A-Za-z/]*(?:\^[23])?)", re.DOTALL)


class Quantity(NamedTuple):
    core: str
    """The text without its unit."""
    value: Ratio | None
    """None where the core is no number."""
    unit: str
    """Canonical; empty where none is given."""

    def equals(self, other: Quantity) -> bool:
        """Of two numbers: in value and unit, or as 100 cm and 1 m are."""
        assert self.value is not None
        assert other.value is not None
        ours, theirs = self.value[0] * other.value[1], other.value[0] * self.value[1]
        one, another = (_SIZES.get(of.unit, ("", 0)) for of in (self, other))
        if one[0] and one[0] == another[0]:
            return ours * one[1] == theirs * another[1]
        return ours == theirs and self.same_unit(other)

    def same_unit(self, other: Quantity) -> bool:
        """Whether nothing is said against it."""
        ours, theirs = self.unit, other.unit
        if "unit" in (ours, theirs):  # of any kind, but a unit is not a square unit
            ours, theirs = (unit if unit.startswith("unit") else "" for unit in (ours, theirs))
        return not ours or not theirs or ours == theirs


@lru_cache(maxsize=8192)
def quantity(text: str) -> Quantity:
    """Reads a number or another expression, with a unit after it or a currency before it.

    After a number any plural is a unit; after another expression, or without a space, only a unit
    that is known and has two letters or more, because x + 2 m may have a variable m.
    """
    number = _number(text)
    if number is not None:
        return Quantity(text, *number)
    if not text or not (text[-1].isalpha() or text[-1] in "°$€£¥¢23"):
        return Quantity(text, None, "")
    words = text.split(" ")
    splits = [(" ".join(words[:i]), " ".join(words[i:]), True) for i in range(1, len(words))[-5:]]
    attached = _ATTACHED.fullmatch(text)
    if attached:
        splits.append((attached[1], attached[2], False))
    for core, after, apart in splits:
        number = _number(core)
        unit = _unit(after, any_noun=apart and number is not None)
        if unit is not None and number is not None:
            return Quantity(core, number[0], _priced(number[1], unit))
        if unit is not None and core and unit[:1] != "°":  # sin 30° is not sin 30
            return Quantity(core, None, unit)
    return Quantity(text, None, "")


def _priced(currency: str, unit: str) -> str:
    """$5 per hour is 5 dollars per hour, and $5 dollars are 5 dollars."""
    if not currency or unit == currency or unit.startswith(f"{currency}/"):
        return unit
    return currency + unit if unit[:1] == "/" else f"{currency}·{unit}" if unit else currency


def _number(text: str) -> tuple[Ratio, str] | None:
    """The exact value of the whole text, and the unit that its currency sign gives."""
    if text.isdecimal() and text.isascii():
        return (int(text), 1), ""
    if text.isalpha():
        value = _SAID.get(text.casefold())
        return value and (value, "")
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    if match["decimal"]:
        top, bottom = _decimal(match["decimal"])
        power = int(match["power"] or match["power_"] or 0)
        top, bottom = top * 10 ** max(power, 0), bottom * 10 ** max(-power, 0)
    elif match["period"]:
        before, shift = _decimal(match["before"] + "0")
        nines = 10 ** len(match["period"]) - 1
        top, bottom = before * nines + int(match["period"]) * 10, shift * nines
    else:
        (top, under), (bottom, over) = (_decimal(match[n] or match[f"{n}_"]) for n in _TERMS)
        whole = int(match["whole"] or match["whole_"] or 0)
        top, bottom = top * over + whole * bottom * under, bottom * under
    if bottom == 0:
        return None
    top *= _SCALES.get(match["scale"] or "", 1)
    bottom *= 100 if match["percent"] else 1
    sign = match["sign"].strip(" +")
    top = -top if "-" in sign else top
    return (top, bottom), _CANONICAL.get(sign.strip("- "), "")


def _decimal(text: str) -> Ratio:
    whole, _, places = text.partition(".")
    return int(whole + places), 10 ** len(places)


def _unit(text: str, *, any_noun: bool) -> str | None:
    """The canonical unit; None if the text is none."""
    parts: list[str] = []
    power = ""
    at = 0
    for match in _PART.finditer(text):
        if match.start() != at:
            return None
        at = match.end()
        name = (match["name"] or "").rstrip(".").lower()
        if match[0] == "/" or name == "per":
            parts.append("/")
        elif name in _POWERS:
            power = _POWERS[name]
        elif name and not (name in _FILLERS and parts):
            known = _CANONICAL.get(name) or _CANONICAL.get(name.removesuffix("s"))
            known = None if _MEGA.fullmatch(match["name"]) else known
            if known and len(name) == 1 and name.isalpha() and not any_noun:
                return None
            if not known and not (any_noun and _is_plural(name)):
                return None
            power = f"^{match['power']}" if match["power"] else power
            parts.append((known or name) + power)
            power = ""
    if at != len(text) or power or not parts:
        return None
    return "·".join(parts).replace("·/·", "/").replace("/·", "/")


def _is_plural(noun: str) -> bool:
    """Apples, but not thirds, tens, sixes or percents, which change the number before them."""
    counts = {noun[:-1], noun[:-2]} & (_SAID.keys() | _SCALES.keys() | {"percent"})
    return noun[-1] == "s" and len(noun) > 3 and not counts and not _PART_OF_ONE.fullmatch(noun)
