"""``burnish data``: write the rows that built-in recipes learn from.

Each function returns the rows of its files by name. Worked sums are computed. Sentences are
sampled from a model, and only those that earn the recipe's reward are kept; validation has words
that the recipe holds out.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from burnish import api
from burnish.cli.tables import print_text
from burnish.environments.guess import NUMBERS, random_games
from burnish.errors import ConfigError, DataError
from burnish.graders.keywords import REWARDS
from burnish.launch.preflight import require_extra
from burnish.randomness import Purpose
from burnish.recipe.load import load_recipe
from burnish.recipe.tasks import GymTask, KeywordsTask, PairsTask
from burnish.runs.directory import replace_file
from burnish.tasks.keywords import HELD_OUT_SEED, draw_question, instruction, split_words
from burnish.tasks.lookups import LookupWorld
from burnish.tasks.products import product_conversations, product_questions
from burnish.tasks.sums import draw_sums, small_sums

Rows = list[dict[str, Any]]
Files = dict[str, Rows | str]
"""Rows by the name of their JSONL file without its ending, and texts by the name of their file."""
HELD_OUT = 0.2
"""Share of the rows that are written to validation.jsonl."""
GAMES = 4096
"""Starts of games of the recipe ``guess``."""
AT_ONCE = 128
"""Minimum number of prompts per call of the model."""
PATIENCE = 200
"""Maximum number of prompts per requested row; after that, the model is given up."""


class DataMaker(NamedTuple):
    """A set of rows that `burnish data` writes."""

    make: Callable[..., Files]
    """Function that returns the files; its keywords are the options."""
    about: str
    next: str
    """The command that learns from the rows if they are where its recipe reads them."""


def make_sums(*, rows: int = 4000, seed: int = 0) -> Files:
    """Training questions of the recipe ``arithmetic``, with worked answers. No question is
    repeated, and none is one that the recipe holds out."""
    require_extra("gym", "burnish data sums")
    task = load_recipe("arithmetic").task
    assert isinstance(task, GymTask)
    made = iter(draw_sums(task, rows, seed))
    held_out = max(1, round(HELD_OUT * rows))
    return {"validation": list(islice(made, held_out)), "train": list(made)}


def make_small_sums(*, seed: int = 0) -> Files:
    """All sums of one-digit numbers, with running totals as answers: rows for the warm start of the
    recipe ``sums``, other rows for the recipe itself, and held-out rows."""
    made = iter(small_sums(seed))
    return {
        "validation": list(islice(made, 256)),
        "train": list(islice(made, 4000)),
        "questions": list(made),
    }


def make_guess(*, rows: int = 16000, seed: int = 0) -> Files:
    """Games of the recipe ``guess``: conversations that guess at random within the hints, for its
    warm start, and the starts of games for the recipe itself. Each number is held out twice."""
    played, draw = random_games(seed), random.Random(f"secrets {seed}")
    return {
        "validation": list(islice(played, 256)),
        "train": list(islice(played, rows)),
        "games": [{"secret": draw.randrange(NUMBERS), "game": n} for n in range(1, GAMES + 1)],
        "held_out": [
            {"secret": number % NUMBERS, "game": -number} for number in range(2 * NUMBERS)
        ],
    }


def make_calculator(*, rows: int = 4800, seed: int = 0) -> Files:
    """Products for the recipe ``calculator``: conversations for its warm start, with and without
    the calculator, and questions for the recipe itself. Numbers of held-out questions occur in no
    other rows."""
    conversations = product_conversations(seed, held_out=False)
    questions = product_questions(seed + 1, held_out=False)
    return {
        "validation": list(islice(product_conversations(seed, held_out=True), 96)),
        "train": list(islice(conversations, rows)),
        "questions": list(islice(questions, 4096)),
        "held_out": list(islice(product_questions(seed + 1, held_out=True), 256)),
    }


def make_search(*, seed: int = 0) -> Files:
    """Documents about made-up people and companies, questions that need two of them, and
    conversations for a warm start. Companies and people of held-out rows occur in no other rows."""
    world = LookupWorld(seed)
    return {
        "validation": list(islice(world.conversations(held_out=True), 90)),
        "train": list(world.conversations(held_out=False)),
        "questions": list(world.questions(held_out=False)),
        "held_out": list(world.questions(held_out=True)),
        **{f"documents/{name}": text for name, text in world.documents.items()},
    }


def make_sentences(
    recipe: str,
    *,
    rows: int,
    samples: int,
    temperature: float,
    model: str = "smollm2-135m",
    max_tokens: int = 48,
    seed: int = 0,
) -> Files:
    """Sentences with the words of a recipe, from a model. For each prompt, the first response that
    earns the recipe's reward is kept, if there is one."""
    task = load_recipe(recipe).task
    assert isinstance(task, KeywordsTask)
    held_out = max(1, round(HELD_OUT * rows))
    sample = partial(
        api.generate,
        model=model,
        n=samples,
        chat=task.chat,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    return {
        "train": sample_rows(sample, task, rows - held_out, seed, validation=False),
        "validation": sample_rows(sample, task, held_out, seed, validation=True),
    }


def sample_rows(
    sample: Callable[..., Any], task: KeywordsTask, count: int, seed: int, *, validation: bool
) -> Rows:
    """Return ``count`` rows, each with a prompt, a response that earned the reward, and the
    keywords.

    ``validation`` selects held-out words instead of training words. Raise a DataError if the model
    hardly ever earns the reward.
    """
    words = split_words(task)[validation]
    drawn_by = HELD_OUT_SEED if validation else seed
    purpose = Purpose.VALIDATION if validation else Purpose.TRAIN
    kept: Rows = []
    asked = 0
    while len(kept) < count:
        if asked >= PATIENCE * count:
            raise DataError(
                f"only {len(kept)} of {count} sentences have their words after {asked} prompts; "
                "sample more responses with --samples, or name a better model with --model"
            )
        more = range(asked, asked + max(AT_ONCE, count - len(kept)))
        drawn = [draw_question(task, words, drawn_by, purpose, i).row["keywords"] for i in more]
        kept += good_rows(
            task, drawn, sample([instruction(some) for some in drawn], seed=seed + asked)
        )
        asked = more.stop
        print_text(f"{min(len(kept), count)} of {count} rows after {asked} prompts")
    return kept[:count]


def good_rows(
    task: KeywordsTask, words: Sequence[list[str]], answers: Sequence[Any]
) -> Iterator[Any]:
    """Yield a row with the first response to each list of words that earned the reward, if there is
    one."""
    reward, samples = REWARDS[task.reward], len(answers) // len(words)
    for i, some in enumerate(words):
        for answer in answers[i * samples : (i + 1) * samples]:
            has_ended = answer.finish == "stop" or not task.must_end
            if has_ended and reward(answer.text, {"keywords": some})["reward"] > 0:
                text = answer.text.strip()
                yield {"prompt": answer.prompt, "answer": text, "keywords": some}
                break


DATA_MAKERS = {
    "small-sums": DataMaker(
        make_small_sums,
        "sums of one-digit numbers with running totals; no model is needed",
        "burnish sft sums-sft",
    ),
    "guess": DataMaker(
        make_guess,
        "games of guessing a number, played at random within the hints; no model is needed",
        "burnish sft guess-sft",
    ),
    "calculator": DataMaker(
        make_calculator,
        "products of three-digit numbers, with and without a calculator; no model is needed",
        "burnish sft calculator-sft",
    ),
    "search": DataMaker(
        make_search,
        "documents, and questions that need two look-ups in them; no model is needed",
        "burnish sft search-sft",
    ),
    "sums": DataMaker(
        make_sums,
        "sums of two to four numbers, worked line by line (extra: gym)",
        "burnish sft arithmetic-sft",
    ),
    "sentences": DataMaker(
        partial(make_sentences, "keywords-scratch", rows=1600, samples=4, temperature=0.4),
        "sentences with one or two of 40 words, sampled from a model in minutes",
        "burnish sft keywords-scratch-sft",
    ),
    "words": DataMaker(
        partial(make_sentences, "keywords", rows=500, samples=8, temperature=1.0),
        "sentences with the words of `keywords`, sampled from a model in minutes",
        "burnish sft",
    ),
}
"""What `burnish data` writes, by name, which is also the directory by default."""


def data_options(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a set of rows with their defaults."""
    parameters = inspect.signature(make).parameters
    return {key.replace("_", "-"): found.default for key, found in parameters.items()}


def write_data(name: str, out: Path | None, options: Mapping[str, Any]) -> str:
    """Write the rows of a name to a new directory; return the command that learns from them.

    ``options`` that are None have their default.
    """
    if name not in DATA_MAKERS:
        raise ConfigError(f"no data {name!r}; the names are {', '.join(DATA_MAKERS)}")
    make, _, command = DATA_MAKERS[name]
    given = {key: value for key, value in options.items() if value is not None}
    known = data_options(make)
    for key in (key for key in given if key.replace("_", "-") not in known):
        flags = ", ".join(f"--{option}" for option in known)
        option = key.replace("_", "-")
        raise ConfigError(f"--{option} has no effect on {name}; its options are {flags}")
    folder = out or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            f"{folder} must be a new or empty directory; choose another one with --out, or delete "
            "it first"
        )
    files = make(**given)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        if isinstance(content, str):
            (folder / file).parent.mkdir(exist_ok=True)
            replace_file(folder / file, content)
            continue
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        replace_file(folder / f"{file}.jsonl", text)
    recipe = load_recipe(command.split()[2] if command.count(" ") > 1 else "sft")
    reads = recipe.task.train if isinstance(recipe.task, PairsTask) else ""
    return command if reads == str(folder / "train.jsonl") else f"{command} --data {folder}"
