"""A recipe, and its sections but for tasks, models, objectives and strategies."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish import strategy
from burnish.pieces.objective import ObjectiveConfig
from burnish.schema import critic, engines, frozen, mesh, selection
from burnish.schema.critic import CriticConfig
from burnish.schema.engines import EngineConfig, Precision
from burnish.schema.frozen import RewardModelConfig, TeacherConfig
from burnish.schema.learning import AllLearn, AnyLearning
from burnish.schema.length import AnyPenalty, NoPenalty, Overlong, ThinkConfig
from burnish.schema.length import check as check_length
from burnish.schema.mesh import MeshConfig
from burnish.schema.models import AnyModel, LanguageConfig, ScratchConfig, SorterConfig
from burnish.schema.selection import SelectionConfig
from burnish.schema.tasks import AnyTask, Asked, MixtureTask, SortTask, Written
from burnish.sections import Section
from burnish.strategy import AnyLoop, AnyRuntime, BufferConfig, FreeLoop, LaggedLoop, RuntimeConfig


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
    overlong: Overlong = Field("keep", description="what becomes of responses cut at the limit")
    think: ThinkConfig | None = Field(None, description="a budget for thinking; None: none")


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
    learn: AnyLearning = Field(AllLearn(), description="all, layers or lora: what learns")
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="gradient steps up to the full rate")
    decay_steps: int | None = Field(None, ge=1, description="gradient steps to 0; None: all")
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    clip_norm: float = Field(1.0, gt=0, description="of the gradient; inf: none")
    max_skipped: int = Field(3, ge=1, description="gradient steps in a row that may not be finite")
    mismatch_mean: float | None = Field(None, gt=0, description="mismatch/logprob_mean that halts")
    mismatch_max: float | None = Field(None, gt=0, description="mismatch/logprob_max that halts")
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
    selection: SelectionConfig = SelectionConfig()
    engine: EngineConfig = EngineConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig | None = Field(None, description="values for GAE; None: none")
    length: AnyPenalty = NoPenalty()
    teacher: TeacherConfig | None = Field(None, description="a model to learn from; None: none")
    reward_model: RewardModelConfig | None = Field(None, description="a learned reward; None: none")
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    loop: AnyLoop = LaggedLoop()
    buffer: BufferConfig | None = Field(None, description="replay of groups; None: none")
    runtime: AnyRuntime = RuntimeConfig()
    mesh: MeshConfig = MeshConfig()

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
        if task.name == "preferences" and train.micro_sequences == 1:
            raise ValueError(
                "train.micro_sequences = 1 would part the two responses of a pair, which are "
                "compared in one forward pass; use at least 2"
            )
        mesh.check(self)
        if not self.is_supervised:
            self._check_batches()
            self.objective.advantage.check(self)
            strategy.check(self)
            critic.check(self)
            check_length(self)
            frozen.check(self)
            selection.check(self)
            engines.check(self)
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
        if group < advantage.smallest_group:
            has_k = "k" in advantage.settings
            remedy = "a smaller objective.advantage.k" if has_k else "objective.advantage = 'raw'"
            raise ValueError(
                f"rollout.group_size must be at least {advantage.smallest_group} for "
                f"objective.advantage = '{advantage.name}', got {group}; use {remedy}, or more "
                "responses"
            )

    @property
    def is_stale(self) -> bool:
        """Whether the learner meets tokens of versions before its own."""
        lag = self.loop.max_lag if isinstance(self.loop, FreeLoop) else self.loop.lag
        return lag > 0 or self.buffer is not None

    @property
    def is_rewarded(self) -> bool:
        """Whether responses have a reward: a task's, or a reward model's."""
        rewards = [getattr(task, "reward", None) for task in self.tasks.values()]
        return self.reward_model is not None or any(name != "none" for name in rewards)

    @property
    def on_mesh(self) -> bool:
        """Whether ranks learn together; torchrun's do even if there is one."""
        name = self.runtime.name
        return name == "torchrun" or (name == "ray" and self.mesh.ranks > 1)

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a response: the recipe's own, and the closing tag of tagged answers."""
        asked = (task for task in self.tasks.values() if isinstance(task, Asked))
        tagged = any(task.answer_format == "r1_zero" for task in asked)
        return tuple(dict.fromkeys([*self.rollout.stop, *["</answer>"] * tagged]))

    @property
    def parts(self) -> dict[str, Any]:
        """The tasks of a mixture by their names; without a mixture the task, whose name is ""."""
        return self.task.tasks if isinstance(self.task, MixtureTask) else {"": self.task}

    @property
    def tasks(self) -> dict[str, Any]:
        """The same by their sections, such as "task.tasks.NAME"."""
        return {f"task.tasks.{name}" if name else "task": t for name, t in self.parts.items()}

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
        return isinstance(self.task, Written)

    @property
    def decay_steps(self) -> int | None:
        """None if the learning rate does not decay."""
        if self.train.schedule == "constant":
            return None
        return self.train.decay_steps or self.gradient_steps
