import dataclasses
import json
from types import SimpleNamespace

import pytest

from burnish import config
from burnish.config import KeywordsTask
from burnish.errors import DataError
from burnish.loops.data import worked, write_keywords, write_sums
from burnish.tasks.files import read_rows
from burnish.tasks.keywords import Keywords
from burnish.types import Finish
from tests.conftest import byte_tokenizer, make_group

TASK = Keywords(KeywordsTask(), tokenizer=byte_tokenizer(), seed=0)


RECIPE = config.load("keywords")


class Sampler:
    """An engine; ``good(n)``: the last of the n-th prompt's samples is right."""

    def __init__(self, good, finish=Finish.STOP):
        self.good, self.finish, self.events, self.sampled = good, finish, [], 0

    @property
    def unfinished(self):
        return len(self.events)

    def submit(self, request):
        asked = byte_tokenizer().decode(request.prompt)
        words = asked.split("words: ")[1].split(".")[0].split(", ")
        right = f" Here are {' and '.join(words)}. \n"
        texts = ["nothing"] * (request.n - 1) + [right if self.good(request.group) else "neither"]
        (base,) = make_group(0, [1], [[1]], [0]).completions
        self.events += [
            dataclasses.replace(
                base, request_id=request.request_id, sample_index=i, text=t, finish=self.finish
            )
            for i, t in enumerate(texts)
        ]

    def step(self):
        events, self.events = self.events, []
        return events


def test_only_answers_with_the_words_are_kept(tmp_path):
    metrics = write_keywords(RECIPE, TASK, Sampler(lambda n: n % 3 == 0), tmp_path / "new", rows=20)
    train, validation = (
        read_rows(tmp_path / "new" / f"{name}.jsonl") for name in ("train", "validation")
    )
    assert (len(train), len(validation)) == (16, 4)
    assert metrics["data/rows"] == 20
    assert metrics["data/share_kept"] == pytest.approx(1 / 3, abs=0.05)
    for row in [*train, *validation]:
        assert row["answer"] == f"Here are {' and '.join(row['keywords'])}."
        assert row["prompt"].endswith(f"words: {', '.join(row['keywords'])}.")
    seen = [{w for row in rows for w in row["keywords"]} for rows in (train, validation)]
    assert not seen[0] & seen[1]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "train.jsonl",
        "validation.jsonl",
    ]
    assert json.dumps(train[0]) in (tmp_path / "new/train.jsonl").read_text()


def test_what_the_engine_aborted_is_no_answer(tmp_path):
    with pytest.raises(DataError, match=r"only 0 of 4 rows after .* prompts"):
        write_keywords(RECIPE, TASK, Sampler(lambda n: True, Finish.ABORT), tmp_path, rows=5)


def test_a_model_that_never_does_it(tmp_path):
    with pytest.raises(DataError, match=r"only 0 of 4 rows after .* prompts"):
        write_keywords(RECIPE, TASK, Sampler(lambda n: False), tmp_path, rows=5)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"can't write to .* choose another"):
        write_keywords(RECIPE, TASK, Sampler(lambda n: True), tmp_path / "file", rows=5)
    with pytest.raises(DataError, match="rows must be at least 2"):
        write_keywords(RECIPE, TASK, Sampler(lambda n: True), tmp_path, rows=1)


@pytest.mark.parametrize(
    ("sum_", "lines"),
    [
        ("4 - 1", ["4 - 1 = 3"]),
        ("5 - 9 + 2", ["5 - 9 = -4", "-4 + 2 = -2"]),
        ("55 + 98 - 30", ["55 + 90 = 145", "145 + 8 = 153", "153 - 30 = 123"]),
        ("4 + 0", ["4 + 0 = 4"]),
        ("14 - 29", ["29 - 10 = 19", "19 - 4 = 15", "14 - 29 = -15"]),
        ("3 - 9 + 17", ["3 - 9 = -6", "17 - 6 = 11", "-6 + 17 = 11"]),
        ("2 - 60 + 8", ["60 - 2 = 58", "2 - 60 = -58", "58 - 8 = 50", "-58 + 8 = -50"]),
        ("0 - 5 - 12", ["0 - 5 = -5", "-5 - 10 = -15", "-15 - 2 = -17"]),
    ],
)
def test_sums_are_worked_term_by_term(sum_, lines):
    assert worked(f"State the final answer to the problem: {sum_} =") == "\n".join(lines)


def sums(questions, generator="chain_sum"):
    """A task that asks the given questions over and over."""

    def prompt(index):
        entry = {"question": questions[index % len(questions)]}
        return SimpleNamespace(reference={"entry": entry})

    return SimpleNamespace(config=SimpleNamespace(generator=generator), prompt=prompt)


def test_no_sum_is_written_twice(tmp_path):
    task = sums([f"{a} + {b} =" for a in range(5) for b in (1, 1, 2)])
    write_sums(task, tmp_path, rows=10)
    train, validation = (read_rows(tmp_path / f"{n}.jsonl") for n in ("train", "validation"))
    assert (len(train), len(validation)) == (8, 2)
    assert len({row["prompt"] for row in [*train, *validation]}) == 10
    assert validation[0] == {"prompt": "0 + 1 =", "answer": "0 + 1 = 1"}


def test_sums_that_can_not_be_written(tmp_path):
    with pytest.raises(DataError, match="only 2 questions differ"):
        write_sums(sums(["1 + 1 =", "1 + 2 ="]), tmp_path, rows=3)
    with pytest.raises(DataError, match="only chain_sum's answers can be worked, got countdown"):
        write_sums(sums(["1 + 1 ="], "countdown"), tmp_path, rows=3)
    with pytest.raises(DataError, match="rows must be at least 2"):
        write_sums(sums(["1 + 1 ="]), tmp_path, rows=1)
    assert list(tmp_path.iterdir()) == []
