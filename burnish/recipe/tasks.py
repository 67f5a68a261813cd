"""The sections of a recipe's tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish.pieces.objective import BY_NAME
from burnish.schema.judged import EvolveConfig, JudgeConfig, Rubric
from burnish.sections import Section, named


class SortTask(Section):
    """Sort the numbers of the prompt; partial credit."""

    name: Literal["sort"] = "sort"
    prompts: int = Field(3, ge=1, description="how many prompts there are")
    length: int = Field(3, ge=2, description="numbers per prompt")
    numbers: int = Field(5, ge=2, description="the numbers are 0 … numbers − 1")
    reward: Literal["inclusion_ordering", "position_match"] = "inclusion_ordering"


LongPrompts = Literal["skip", "cut"]
"""skip: another prompt is asked in place of one that is too long; cut: its beginning is cut off."""


class KeywordsTask(Section):
    """Write a sentence that includes the given words."""

    ordered: ClassVar[tuple[str, str] | None] = ("least", "most")
    name: Literal["keywords"] = "keywords"
    least: int = Field(2, ge=1, description="keywords per prompt, at least")
    most: int = Field(4, ge=1, le=20, description="keywords per prompt, at most")
    reward: Literal["inclusion", "use"] = "inclusion"
    """use: a word counts outside lists, and at most twice."""
    must_end: bool = Field(False, description="a response that does not end by itself earns 0")
    chat: bool = Field(True, description="the prompt goes in as a user's chat message")
    words: int | None = Field(None, ge=1, description="only so many words; None: all")
    validation_words: float = Field(0.2, ge=0, lt=1, description="share of words that is held out")
    train_prompts: int | None = Field(None, ge=1, description="which come again; None: no end")
    validation_prompts: int = Field(256, ge=1)
    long_prompts: LongPrompts = "skip"


class Graded(Section):
    """Settings of tasks whose responses are graded by worker processes."""

    must_end: bool = Field(False, description="a response that does not end by itself earns 0")
    workers: int = Field(2, ge=1, description="grader processes")
    cpu_seconds: float = Field(2.0, gt=0, description="per grade, in the worker's own CPU time")
    wall_seconds: float = Field(20.0, gt=0, description="per grade")
    memory_mb: int = Field(1024, ge=1, description="per worker, beyond what the reward loads")


class Rows(Section):
    """Rows of a JSONL file, each with a prompt, some of them held out."""

    train: str | None = Field(None, description="a JSONL file; None: prompts come from a script")
    rows: list[dict[str, Any]] | None = Field(None, exclude=True)
    """Rows that a script gives in the place of ``train``; a run keeps them in a file of its own."""
    validation: str | None = Field(None, description="the same; None: rows of train are held out")
    validation_rows: int | None = Field(None, ge=1)
    """How many rows are held out; None if all of validation, or a tenth of train."""
    chat: bool = Field(True, description="a prompt that is a text goes in as a user's chat message")


class FilesTask(Rows, Graded):
    """Rows with a reward of the user's own."""

    name: Literal["files"] = "files"
    reward: str | None = Field(None, description="FILE.py:NAME or a built-in name")
    function: Callable[..., Any] | None = Field(None, exclude=True)
    """A reward that a script gives in the place of ``reward``; no file keeps it."""


R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\nUser: {question}\nAssistant: <think>"
)
PROMPTS = {"question_only": "{question}", "r1_zero": R1_ZERO}


class Asked(Graded):
    """Settings of tasks that put a question into a prompt and read an answer from the response."""

    prompt: str = Field("r1_zero", pattern=r"^r1_zero$|^question_only$|\{question\}")
    """A prompt's name, or a text of the user's own with {question} in it."""
    answer: Literal["r1_zero", "boxed", "hash", "last_number"] | None = None
    """How a response says its answer; None: in tags after the prompt r1_zero, else in a box."""
    chat: bool = Field(False, description="the prompt goes in as a user's chat message")

    @property
    def template(self) -> str:
        return PROMPTS.get(self.prompt, self.prompt)

    @property
    def answer_format(self) -> str:
        return self.answer or ("r1_zero" if self.prompt == "r1_zero" else "boxed")


class MathTask(Asked, Rows):
    """Questions with an answer that can be checked: GSM8K, MATH and data laid out like them."""

    name: Literal["math"] = "math"
    hints: float = Field(0.0, ge=0, le=1)
    """Share of the training prompts that go on with the beginning of the row's worked answer."""


class GymTask(Asked):
    """A generator of the package reasoning-gym, with its own scorer."""

    name: Literal["gym"] = "gym"
    generator: str = Field(description="such as chain_sum or gsm_symbolic")
    settings: dict[str, Any] = Field({}, description="of the generator, by their names there")
    train_prompts: int | None = Field(None, ge=1, description="which come again; None: no end")
    validation_prompts: int = Field(256, ge=1, description="held out, the same for every seed")
    long_prompts: LongPrompts = "skip"


class JudgedTask(Rows):
    """Rows whose responses a judge scores, criterion by criterion."""

    name: Literal["judged"] = "judged"
    rubric: Rubric | None = Field(None, description="of rows that have none of their own")
    judge: JudgeConfig
    evolve: EvolveConfig | None = Field(None, description="None: the rubric stays as it is")
    must_end: bool = Field(False, description="one that does not end by itself earns at most 0")


class Written(Rows):
    """Rows to learn from as they stand: a supervised run."""

    epochs: float = Field(1.0, gt=0, allow_inf_nan=False, description="passes over the rows")


class PreferencesTask(Written):
    """Rows with a prompt, a chosen response and a rejected one: a reward is learned from them."""

    name: Literal["preferences"] = "preferences"


class PairsTask(Written):
    """Rows with a prompt (or GSM8K's question) and an answer to learn."""

    name: Literal["pairs"] = "pairs"
    prompt: str = Field("{prompt}", pattern=r"\{prompt\}", description="how a row's text is asked")
    answer: str = Field("{answer}", pattern=r"\{answer\}", description="how its answer is written")


Part = KeywordsTask | FilesTask | MathTask | GymTask | JudgedTask
AnyPart = Annotated[Part, BY_NAME]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MixtureTask(Section):
    """Several tasks; the task of each group is drawn by weight."""

    name: Literal["mixture"] = "mixture"
    weights: dict[str, Positive]
    scales: dict[str, Positive] = Field({}, description="factors of rewards as they are learned")
    tasks: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], AnyPart] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tasks.keys() != self.weights.keys():
            tasks, weights = ", ".join(self.tasks), ", ".join(self.weights)
            raise ValueError(f"needs a weight for each task, got tasks {tasks}, weights {weights}")
        if unknown := self.scales.keys() - self.tasks.keys():
            raise ValueError(f"has scales of {', '.join(unknown)}, and no tasks of that name")
        return self


AnyTask = Annotated[
    SortTask | Part | PairsTask | PreferencesTask | MixtureTask, BY_NAME, named("sort")
]
