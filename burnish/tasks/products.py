"""Products of three-digit numbers: the questions of the recipe ``calculator``, and conversations
that answer them, with the calculator or step by step without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from burnish.environments.calculator import calculator
from burnish.environments.schema import tool_schema

HELD_OUT_NUMBERS = 100
"""Numbers between 100 and 999 that no training question has."""
QUESTIONS = (
    "What is {a} * {b}?",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
    "Compute the product of {a} and {b}.",
)


def product_questions(seed: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield endless questions with their answers. The numbers of held-out questions occur in no
    other question, whatever the seed."""
    numbers = list(range(100, 1000))
    random.Random(0).shuffle(numbers)
    chosen = numbers[:HELD_OUT_NUMBERS] if held_out else numbers[HELD_OUT_NUMBERS:]
    draw, seen = random.Random(f"{seed} {held_out}"), set()
    while True:
        a, b = draw.choice(chosen), draw.choice(chosen)
        if (a, b) in seen:
            continue
        seen.add((a, b))
        prompt = draw.choice(QUESTIONS).format(a=a, b=b)
        yield {"prompt": prompt, "answer": str(a * b), "a": a, "b": b}


def product_conversations(seed: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield endless conversations to learn from. In turn: the calculator is called; it could be,
    and the product is worked out instead; there is no calculator."""
    tools = [tool_schema(calculator, "calculator")]
    for number, row in enumerate(product_questions(seed, held_out=held_out)):
        asked = {"role": "user", "content": row["prompt"]}
        worked = {"role": "assistant", "content": worked_product(row["a"], row["b"])}
        if number % 3 == 0:
            yield {"messages": [asked, *_called(row)], "tools": tools}
        else:
            yield {"messages": [asked, worked], "tools": tools if number % 3 == 1 else []}


def worked_product(a: int, b: int) -> str:
    """Return the product of two numbers, worked out by the digits of the second."""
    parts = [int(digit) * 10**place for place, digit in enumerate(reversed(str(b)))][::-1]
    parts = [part for part in parts if part]
    factors = " + ".join(f"{a}*{part}" for part in parts)
    terms = " + ".join(str(a * part) for part in parts)
    steps = [f"{a}*{b}", factors, terms, str(a * b)]
    return " = ".join(dict.fromkeys(steps))


def _called(row: dict[str, Any]) -> list[dict[str, Any]]:
    expression = f"{row['a']} * {row['b']}"
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": calculator(expression)},
        {"role": "assistant", "content": f"{expression} = {row['answer']}"},
    ]
