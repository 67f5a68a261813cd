"""The game of the recipe ``guess``: find a number below 64 by guessing; each guess is answered with
"higher" or "lower", and with nothing else. Binary search needs 5.125 guesses on average.

Each guess costs 0.1, and the right one earns 1. Grader workers' rule holds here, too: this module
imports only the standard library.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

NUMBERS = 64
ASK = f"0 to {NUMBERS - 1}?"
"""The first message, which is short because every game pays for its tokens."""
COST = 0.1
"""Reward that each guess costs."""


class Guess:
    """One game. The row's "secret" is the number to find; without it, the seed draws one."""

    deterministic = True

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        drawn = random.Random(seed).randrange(NUMBERS)
        self._secret, self._guesses = int(row.get("secret", drawn)), 0
        return ASK

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._guesses += 1
        text = message["content"].strip()
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 3 else NUMBERS
        found = number == self._secret
        return {
            "messages": ASK if number >= NUMBERS else hint(self._secret, number),
            "reward": float(found) - COST,
            "done": found,
            "metrics": {"guesses": self._guesses, "correct": float(found)},
        }


def hint(secret: int, guess: int) -> str:
    """Return the answer to a guess."""
    if guess == secret:
        return "yes"
    return "higher" if secret > guess else "lower"


def random_games(seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless games as conversations to learn from: each guess is drawn at random from the
    numbers that the hints leave, and has two digits. Such play needs 6.64 guesses on average."""
    draw = random.Random(seed)
    while True:
        secret, low, high = draw.randrange(NUMBERS), 0, NUMBERS - 1
        messages = [{"role": "user", "content": ASK}]
        while True:
            guess = draw.randint(low, high)
            messages.append({"role": "assistant", "content": f"{guess:02}"})
            if guess == secret:
                break
            messages.append({"role": "user", "content": hint(secret, guess)})
            low, high = (guess + 1, high) if secret > guess else (low, guess - 1)
        yield {"messages": messages}
