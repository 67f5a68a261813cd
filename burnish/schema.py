"""The schema of a recipe: pydantic models of its tasks, its models and its other sections.

``config`` reads, checks and writes recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from burnish import strategy
from burnish.pieces import BY_NAME, ObjectiveConfig
from burnish.sections import Section, named
from burnish.strategy import AnyLoop, AnyRuntime, BufferConfig, FreeLoop, LaggedLoop, RuntimeConfig

Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""auto: bf16 where the processor or GPU multiplies it, else fp32."""


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
    validation_prompts: int = Field(256, ge=1, description="held out, the same for every seed")
    long_prompts: LongPrompts = "skip"


class PairsTask(Rows):
    """Rows with a prompt (or GSM8K's question) and an answer to learn: a supervised run."""

    name: Literal["pairs"] = "pairs"
    epochs: float = Field(1.0, gt=0, allow_inf_nan=False, description="passes over the rows")
    prompt: str = Field("{prompt}", pattern=r"\{prompt\}", description="how a row's text is asked")
    answer: str = Field("{answer}", pattern=r"\{answer\}", description="how its answer is written")


AnyPart = Annotated[KeywordsTask | FilesTask | MathTask | GymTask, BY_NAME]


class MixtureTask(Section):
    """Several tasks; the task of each group is drawn by weight."""

    name: Literal["mixture"] = "mixture"
    weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    tasks: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], AnyPart] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tasks.keys() != self.weights.keys():
            tasks, weights = ", ".join(self.tasks), ", ".join(self.weights)
            raise ValueError(f"needs a weight for each task, got tasks {tasks}, weights {weights}")
        return self


AnyTask = Annotated[
    SortTask | KeywordsTask | FilesTask | MathTask | GymTask | PairsTask | MixtureTask,
    BY_NAME,
    named("sort"),
]


class SorterConfig(Section):
    """The non-autoregressive sorting model."""

    name: Literal["sorter"] = "sorter"
    width: int = Field(10, ge=1, description="embedding dimension")


class ScratchConfig(Section):
    """A transformer of one's own, with random weights from the seed."""

    name: Literal["scratch"] = "scratch"
    tokenizer: str = Field("smollm2-135m", description="a model whose tokenizer it takes")
    layers: int = Field(4, ge=1)
    width: int = Field(512, ge=1, description="d_model")
    heads: int = Field(16, ge=1)
    d_ff: int = Field(1344, ge=1)
    context: int = Field(256, ge=2)
    fp32_head: bool = Field(False, description="logits in float32 whatever the precision")


class LanguageConfig(Section):
    """A pretrained language model."""

    name: str = Field("smollm2-135m", description="a name, a directory, or hf:ORG/NAME")
    fp32_head: bool = Field(False, description="logits in float32 whatever the precision")


def _model_kind(model: Any) -> str:
    name = model.get("name", "sorter") if isinstance(model, Mapping) else getattr(model, "name", "")
    return name if name in ("sorter", "scratch") else "language"


AnyModel = Annotated[
    Annotated[SorterConfig, Tag("sorter")]
    | Annotated[ScratchConfig, Tag("scratch")]
    | Annotated[LanguageConfig, Tag("language")],
    Discriminator(_model_kind),
]


class RolloutConfig(Section):
    ordered: ClassVar[tuple[str, str] | None] = ("min_tokens", "max_tokens")
    batch: int = Field(30, ge=1, description="responses per rollout")
    group_size: int = Field(10, ge=1, description="responses per prompt")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_tokens: int = Field(48, ge=1, description="per response")
    min_tokens: int = Field(0, ge=0, description="no end before this many")
    stop: list[str] = Field([], description="texts that end a response")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    truncated: bool = Field(False, description="top_p or top_k is meant in training, too")
    max_errors: float = Field(0.1, ge=0, le=1, description="share of grades that may be errors")


class EngineConfig(Section):
    """The sampler; the learner's precision is ``train.precision``."""

    precision: Precision = Field("auto", description="auto: as train.precision")
    kv_mb: int = Field(1024, ge=1, description="memory for keys and values")
    max_running: int = Field(128, ge=1, description="samples that decode at once")


class ValidationConfig(Section):
    """Held-out prompts, always with the same draws."""

    every: int = Field(10, ge=1, description="steps; also before the first and after the last")
    samples: int = Field(1, ge=1, description="responses per prompt")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False, description="0: greedy")
    max_tokens: int | None = Field(None, ge=1, description="none: as in training")


class CheckpointConfig(Section):
    every: int = Field(10, ge=1, description="steps; also after the last")
    keep: int = Field(2, ge=1, description="the last so many are kept, and the best")


class LogConfig(Section):
    rollouts: int = Field(16, ge=0, description="responses per step that are kept whole")


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    steps: int = Field(100, ge=1, description="rollouts, each followed by its gradient steps")
    batch: int = Field(30, ge=1, description="responses per gradient step")
    epochs: int = Field(1, ge=1, description="passes over each rollout")
    micro_sequences: int | None = Field(None, ge=1, description="responses per forward pass")
    micro_tokens: int | None = Field(None, ge=1, description="per forward pass; None: no bound")
    recompute: bool = Field(False, description="layers run again backwards, to save memory")
    precision: Precision = Field("auto", description="of the forward and backward passes")
    layers: int | None = Field(None, ge=1, description="only the last so many learn; None: all")
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="gradient steps up to the full rate")
    decay_steps: int | None = Field(None, ge=1, description="gradient steps to 0; None: all")
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    clip_norm: float = Field(1.0, gt=0, description="of the gradient; inf: none")
    max_skipped: int = Field(3, ge=1, description="gradient steps in a row that may not be finite")
    log_kl: bool = Field(False, description="KL to the initial model and the step before")
    log_kl_responses: int | None = Field(None, ge=1, description="on how many; None: all")


class Recipe(Section):
    name: str = Field("run", pattern=r"^[\w.-]+$", description="the beginning of its runs' names")
    description: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    task: AnyTask = SortTask()
    model: AnyModel = SorterConfig()
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    loop: AnyLoop = LaggedLoop()
    buffer: BufferConfig | None = Field(None, description="replay of groups; None: none")
    runtime: AnyRuntime = RuntimeConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        task, model = self.task, self.model
        if isinstance(task, SortTask) != isinstance(model, SorterConfig):
            raise ValueError(
                f"task.name = '{task.name}' does not go with model.name = '{model.name}': the "
                "sorting task needs 'sorter', the others a language model such as 'smollm2-135m'"
            )
        rollout, train = self.rollout, self.train
        if (rollout.top_p < 1 or rollout.top_k is not None) and not rollout.truncated:
            raise ValueError(
                "rollout.top_p and top_k cut off tokens that the learner takes for possible; "
                "sample without them, or set rollout.truncated = true if it is meant"
            )
        if None not in (train.micro_sequences, train.micro_tokens):
            raise ValueError(
                "micro-batches are given in sequences or in tokens, got train.micro_sequences = "
                f"{train.micro_sequences} and train.micro_tokens = {train.micro_tokens}; remove one"
            )
        if not self.is_supervised:
            self._check_batches()
            strategy.check(self)
        return self

    def _check_batches(self) -> None:
        group, advantage = self.rollout.group_size, self.objective.advantage
        sizes = {"rollout.batch": self.rollout.batch, "train.batch": self.train.batch}
        sizes["rollout.group_size"] = group
        for (whole, size), (part, unit) in pairwise(sizes.items()):
            if size % unit:
                raise ValueError(
                    f"{whole} = {size} must be a multiple of {part} = {unit}; "
                    f"use {size // unit * unit + unit}"
                )
        if group < advantage.group:
            raise ValueError(
                f"rollout.group_size must be at least 2 for objective.advantage = "
                f"'{advantage.name}', got {group}; use objective.advantage = 'raw'"
            )

    @property
    def is_stale(self) -> bool:
        """Whether the learner meets tokens of versions before its own."""
        lag = self.loop.max_lag if isinstance(self.loop, FreeLoop) else self.loop.lag
        return lag > 0 or self.buffer is not None

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a response: the recipe's own, and the closing tag of tagged answers."""
        tagged = any(isinstance(t, Asked) and t.answer_format == "r1_zero" for t in self.tasks)
        return tuple(dict.fromkeys([*self.rollout.stop, *["</answer>"] * tagged]))

    @property
    def tasks(self) -> list[Any]:
        """The task, or the tasks of a mixture."""
        return list(self.task.tasks.values()) if isinstance(self.task, MixtureTask) else [self.task]

    @property
    def source(self) -> str:
        """The name of the model whose files are read. A model from scratch reads its tokenizer's
        files; the name is empty for the sorting model."""
        if isinstance(self.model, ScratchConfig):
            return self.model.tokenizer
        return self.model.name if isinstance(self.model, LanguageConfig) else ""

    @property
    def prompts_per_rollout(self) -> int:
        return self.rollout.batch // self.rollout.group_size

    @property
    def train_batches(self) -> int:
        """How many train batches a rollout makes."""
        return self.rollout.batch // self.train.batch

    @property
    def gradient_steps_per_rollout(self) -> int:
        return self.train_batches * self.train.epochs

    @property
    def gradient_steps(self) -> int:
        if self.is_supervised:
            return self.train.steps
        return self.train.steps * self.gradient_steps_per_rollout

    @property
    def is_supervised(self) -> bool:
        """Whether a run learns from written answers, so that nothing is sampled or graded."""
        return isinstance(self.task, PairsTask)

    @property
    def decay_steps(self) -> int | None:
        """None if the learning rate does not decay."""
        if self.train.schedule == "constant":
            return None
        return self.train.decay_steps or self.gradient_steps
