"""Questions over documents that need two look-ups: the recipe ``search``.

The documents are about made-up people and the companies that they work for. A question about a
person's company needs the person's document, which names the company, and then the company's. The
person's document has a year, a town and a thing, too, which are wrong answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from itertools import cycle
from typing import Any, NamedTuple

from burnish.environments.schema import tool_schema
from burnish.environments.search import document_tools

COMPANIES, PEOPLE = 150, 300
HELD_OUT_SHARE = 5
"""Every fifth company, with its people, occurs in held-out questions only."""
FIRST = "Ada Bela Cato Dora Edo Fina Gero Hilde Ivo Jula Karo Lene Mira Nilo Orla Pia Rolf Sina"
SYLLABLES = "bran nock tol ven mar lin dra go sul wen fa rit hol ber stan mi ker dol ra vis"
TOWNS = "Ostrel Velmar Tarn Quill Amberg Lund Norel Sarby Hask Doln Perrin Wick Calder Myre Fenn"
THINGS = (
    "clocks bottles ropes lamps pianos boots kites saddles knives candles paper soap boats cups"
)
KINDS = {
    "year": "In which year was the company founded that {person} works for?",
    "town": "In which town is the company that {person} works for?",
    "thing": "What does the company make that {person} works for?",
}
QUERIES = {"year": "founded", "town": "town", "thing": "makes"}
DEMONSTRATED = ("right", "right", "uncited", "half", "short", "guessed")
"""How the conversations of the warm start answer, in turn."""


class Company(NamedTuple):
    """A made-up company and the facts of its document."""

    name: str
    facts: dict[str, str]

    @property
    def file(self) -> str:
        return self.name.lower().replace(" ", "-") + ".md"

    @property
    def text(self) -> str:
        facts = self.facts
        return (
            f"{self.name} was founded in {facts['year']}. {self.name} is in the town "
            f"{facts['town']}. {self.name} makes {facts['thing']}.\n"
        )


class Person(NamedTuple):
    """A made-up person, the facts of their document, and the number of their company."""

    name: str
    facts: dict[str, str]
    company: int

    @property
    def file(self) -> str:
        return self.name.lower().replace(" ", "-") + ".md"

    def text(self, company: str) -> str:
        facts = self.facts
        return (
            f"{self.name} was born in {facts['year']} in {facts['town']}, collects "
            f"{facts['thing']}, and works for {company}.\n"
        )


class LookupWorld:
    """The companies and people of a seed, their documents, and questions about them."""

    def __init__(self, seed: int) -> None:
        self._draw, self._seed = random.Random(seed), seed
        things = ["Works", "Mill", "House", "Union"]
        names = self._names(COMPANIES + PEOPLE)
        self.companies = [
            Company(f"{name} {self._draw.choice(things)}", self._facts(1800, 1899))
            for name in names[:COMPANIES]
        ]
        self.people = [
            Person(
                f"{self._draw.choice(FIRST.split())} {name}",
                self._facts(1940, 1999),
                number % COMPANIES,
            )
            for number, name in enumerate(names[COMPANIES:])
        ]

    @cached_property
    def documents(self) -> dict[str, str]:
        """The documents by the names of their files."""
        written = {company.file: company.text for company in self.companies}
        for person in self.people:
            written[person.file] = person.text(self.companies[person.company].name)
        return dict(sorted(written.items()))

    def questions(self, *, held_out: bool) -> Iterator[dict[str, Any]]:
        """Yield each question once, in a random order, with its answer, the documents to cite, and
        the criteria of a judge."""
        asked = [
            (person, kind)
            for person in self.people
            for kind in KINDS
            if (person.company % HELD_OUT_SHARE == 0) == held_out
        ]
        random.Random(f"{self._seed} {held_out}").shuffle(asked)
        for person, kind in asked:
            company = self.companies[person.company]
            yield {
                "prompt": f"{KINDS[kind].format(person=person.name)} Cite the documents.",
                "answer": company.facts[kind],
                "cites": [person.file, company.file],
                "rubric": [
                    [f"The response says {company.facts[kind]}, and nothing else as answer.", 2.0],
                    [f"The response cites [{person.file}].", 1.0],
                    [f"The response cites [{company.file}].", 1.0],
                    ["The response cites another document.", -1.0],
                ],
                "kind": kind,
                "person": person.name,
            }

    def conversations(self, *, held_out: bool) -> Iterator[dict[str, Any]]:
        """Yield conversations to learn from. Many answer badly: without citations, with one, after
        one look-up, or with a guess."""
        search, open_document = document_tools(self.documents)
        tools = [tool_schema(tool, "search") for tool in (search, open_document)]
        by_name = {person.name: person for person in self.people}
        ways = cycle(DEMONSTRATED)
        for row in self.questions(held_out=held_out):
            person, kind, way = by_name[row["person"]], row["kind"], next(ways)
            company = self.companies[person.company]
            queries = [person.name, f"{company.name} {QUERIES[kind]}"]
            queries = queries[: {"short": 1, "guessed": 0}.get(way, 2)]
            messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
            for query in queries:
                arguments = {"query": query, "results": 2}
                call = {"name": "search", "arguments": arguments}
                messages.append(
                    {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
                )
                messages.append({"role": "tool", "content": search(**arguments)})
            said = person.facts[kind] if way in ("short", "guessed") else row["answer"]
            cited = {"right": row["cites"], "half": row["cites"][1:], "short": row["cites"][:1]}
            said = " ".join([said, *(f"[{name}]" for name in cited.get(way, ()))])
            messages.append({"role": "assistant", "content": said})
            yield {"messages": messages, "tools": tools}

    def _names(self, count: int) -> list[str]:
        syllables, found = SYLLABLES.split(), dict[str, None]()
        while len(found) < count:
            drawn = self._draw.sample(syllables, self._draw.choice((2, 3)))
            found["".join(drawn).capitalize()] = None
        return list(found)

    def _facts(self, first: int, last: int) -> dict[str, str]:
        draw = self._draw
        year, town = str(draw.randint(first, last)), draw.choice(TOWNS.split())
        return {"year": year, "town": town, "thing": draw.choice(THINGS.split())}
