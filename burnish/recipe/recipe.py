"""The recipe, and the sections that are not in a separate module.

These models check each section alone. ``burnish.recipe.load.load_recipe`` also checks the rules
that join sections (``burnish.recipe.rules``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from burnish.recipe.base import Section
from burnish.recipe.critic import CriticConfig
from burnish.recipe.engine import AnyEngine, NativeConfig, Precision
from burnish.recipe.frozen import RewardModelConfig, TeacherConfig
from burnish.recipe.length import AnyPenalty, NoPenalty, Overlong, ThinkConfig
from burnish.recipe.mesh import MeshConfig
from burnish.recipe.models import AnyModel, LanguageConfig, SorterConfig
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.runtime import (
    AnyLoop,
    AnyRuntime,
    BufferConfig,
    FreeLoop,
    LaggedLoop,
    LocalRuntime,
)
from burnish.recipe.selection import SelectionConfig
from burnish.recipe.tasks import AnyTask, MixtureTask, QuestionTask, SortTask, SupervisedTask
from burnish.recipe.trainable import AllLearn, AnyLearning


class RolloutConfig(Section):
    """Sampling of the responses that the policy learns from."""

    ordered: ClassVar[tuple[str, str] | None] = ("min_tokens", "max_tokens")
    batch: int = Field(30, ge=1, description="responses per rollout")
    group_size: int = Field(10, ge=1, description="responses per prompt")
    temperature: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="divides the logits before a token is sampled"
    )
    max_tokens: int = Field(48, ge=1, description="maximum length of a response")
    min_tokens: int = Field(0, ge=0, description="minimum length of a response")
    stop: list[str] = Field([], description="texts that end a response")
    top_p: float = Field(
        1.0, gt=0, le=1, description="total probability of the most likely tokens that are drawn"
    )
    top_k: int | None = Field(None, ge=1, description="number of most likely tokens; None: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="least probability of a token, as a share of the largest one"
    )
    repetition_penalty: float = Field(
        1.0,
        ge=0.01,
        allow_inf_nan=False,
        description="divides positive logits of tokens that occurred before, multiplies others",
    )
    truncated: bool = Field(
        False, description="confirms that top_p, top_k, min_p or repetition_penalty is intended"
    )
    max_errors: float = Field(
        0.1, ge=0, le=1, description="largest share of grades that may be errors"
    )
    overlong: Overlong = Field(
        "keep", description="treatment of responses truncated at the length limit"
    )
    think: ThinkConfig | None = Field(None, description="budget for thinking; None: unlimited")
    history: Literal["append", "template"] = Field(
        "append",
        description="episodes whose chat template rewrites earlier turns: append keeps the tokens "
        "that were sampled, template follows it in a new token sequence",
    )

    @property
    def prompts(self) -> int:
        """Prompts per rollout; each has one group of responses."""
        return self.batch // self.group_size

    @property
    def reshaping(self) -> list[str]:
        """The settings that change the probabilities of the draws, as "name = value"."""
        off = {"top_p": 1, "top_k": None, "min_p": 0, "repetition_penalty": 1}
        given = {name: getattr(self, name) for name in off}
        return [f"{name} = {value:g}" for name, value in given.items() if value != off[name]]


class ValidationConfig(Section):
    """Evaluation on held-out prompts, always with the same random draws."""

    every: int = Field(
        10, ge=1, description="steps between evaluations; also before the first and after the last"
    )
    samples: int = Field(1, ge=1, description="responses per prompt")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False, description="0: greedy")
    max_tokens: int | None = Field(
        None, ge=1, description="maximum length of a response; None: rollout.max_tokens"
    )
    metric: str | None = Field(
        None,
        pattern="^validation/",
        description="metric that selects the best checkpoint and ends the run early; None: "
        "validation/reward, or validation/loss of a supervised run",
    )
    goal: Literal["max", "min"] | None = Field(
        None,
        description="whether higher or lower values of metric are better; None: min for "
        "validation/loss, max for all others",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="validations without an improvement of metric after which the run ends; "
        "None: never",
    )
    min_delta: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="smallest change of metric, exclusive, that is an improvement",
    )


class CheckpointConfig(Section):
    """How often checkpoints are written, and how many are kept."""

    every: int = Field(10, ge=1, description="steps between checkpoints; also after the last")
    keep: int = Field(2, ge=1, description="number of latest checkpoints to keep beside the best")


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


def _as_list(given: Any) -> Any:
    """Convert the name of a single tracker to a list, "none" to an empty one, and leave out
    repeated names."""
    if given == "none":
        return []
    names = [given] if isinstance(given, str) else given
    return list(dict.fromkeys(names)) if isinstance(names, list | tuple) else names


class LogConfig(Section):
    """Records of a run in addition to its metrics."""

    rollouts: int = Field(16, ge=0, description="responses recorded in full per step")
    trackers: Annotated[list[TrackerName], BeforeValidator(_as_list)] | None = Field(
        None,
        description="experiment trackers that show the run; None: tensorboard, if it is installed",
    )
    project: str = Field("burnish", min_length=1, description="the trackers' project")
    group: str | None = Field(None, min_length=1, description="the trackers' group; None: no group")
    samples: int = Field(
        16, ge=0, description="responses in each of the trackers' tables, at validated steps"
    )

    @property
    def follows(self) -> bool:
        """Whether a tracker follows the run in its own process; TensorBoard does not."""
        return any(name != "tensorboard" for name in self.trackers or ())


Beta = Annotated[float, Field(ge=0, lt=1)]
FP32_UNCHANGED = 2.0**-25
"""Largest x for which 1 − x is 1 in fp32."""


class TrainConfig(Section):
    """Optimisation of the policy."""

    steps: int = Field(100, ge=1, description="rollouts, each followed by its gradient steps")
    batch: int = Field(30, ge=1, description="responses per gradient step")
    epochs: int = Field(1, ge=1, description="passes over each rollout")
    micro_sequences: int | None = Field(
        None, ge=1, description="responses per forward pass; None: unlimited"
    )
    micro_tokens: int | None = Field(
        None, ge=1, description="tokens per forward pass; None: unlimited"
    )
    recompute: bool = Field(
        False, description="whether layers are recomputed in the backward pass to save memory"
    )
    offload: bool = Field(
        False,
        description="whether AdamW's moments are in main memory, and on the GPU only to be updated",
    )
    precision: Precision = Field("auto", description="precision of forward and backward passes")
    learn: AnyLearning = Field(AllLearn(), description="the weights to train: all, layers or lora")
    learning_rate: float = Field(
        1e-3,
        gt=0,
        allow_inf_nan=False,
        description="AdamW's learning rate after the warm-up; pretrained models have no default",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate falls after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="gradient steps until the full learning rate")
    decay_steps: int | None = Field(
        None, ge=1, description="gradient steps until the rate is lowest; None: all steps"
    )
    final_share: float = Field(
        0.0, ge=0, lt=1, description="lowest rate of the schedule, as a share of learning_rate"
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="AdamW's decay of the mean and of the square of the gradient"
    )
    eps: float = Field(
        1e-8, ge=1e-30, allow_inf_nan=False, description="ε of AdamW, added to its denominator"
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="each step scales weights by 1 − rate · this; norms and biases are exempt",
    )
    clip_norm: float = Field(1.0, gt=0, description="largest gradient norm; inf: unbounded")
    max_skipped: int = Field(
        3, ge=1, description="consecutive gradient steps that may be skipped as not finite"
    )
    mismatch_mean: float | None = Field(
        None, gt=0, description="mismatch/logprob_mean above which the run stops; None: never"
    )
    mismatch_max: float | None = Field(
        None, gt=0, description="mismatch/logprob_max above which the run stops; None: never"
    )
    log_kl: bool = Field(
        False, description="whether to log the KL to the initial and to the previous policy"
    )
    log_kl_responses: int | None = Field(
        None, ge=1, description="number of responses for log_kl; None: all"
    )

    @property
    def has_own_rate(self) -> bool:
        """Whether the recipe sets the learning rate."""
        return "learning_rate" in self.model_fields_set

    @model_validator(mode="after")
    def _check_micro_batches(self) -> Self:
        if None not in (self.micro_sequences, self.micro_tokens):
            raise ValueError(
                "takes micro-batches in sequences or in tokens, got micro_sequences = "
                f"{self.micro_sequences} and micro_tokens = {self.micro_tokens}; remove one"
            )
        return self

    @model_validator(mode="after")
    def _check_weight_decay(self) -> Self:
        if 0 < self.learning_rate * self.weight_decay <= FP32_UNCHANGED:
            raise ValueError(
                f"has weight_decay = {self.weight_decay:g}, which has no effect at a learning_rate "
                f"of {self.learning_rate:g}: in fp32, 1 − rate · weight_decay is 1; use "
                f"weight_decay = {2.01 * FP32_UNCHANGED / self.learning_rate:.2g} or more, or 0"
            )
        return self


class Recipe(Section):
    """All settings of a run."""

    name: str = Field("run", pattern=r"^[\w.-]+$", description="prefix of the names of its runs")
    description: str = Field("", description="sentence that `burnish recipes` prints")
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed of all random draws; the same seed repeats a run"
    )
    task: AnyTask = Field(SortTask(), description="source of prompts and of their rewards")
    model: AnyModel = Field(SorterConfig(), description="the policy's initial model")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="cpu, cuda or cuda:N; auto: a GPU if torch finds one, else the CPU",
    )
    rollout: RolloutConfig = Field(RolloutConfig(), description="sampling of responses")
    selection: SelectionConfig = Field(
        SelectionConfig(), description="groups to learn from, and prompts to sample again"
    )
    engine: AnyEngine = Field(NativeConfig(), description="program that samples responses")
    objective: ObjectiveConfig = Field(
        ObjectiveConfig(), description="advantage, loss, reduction, KL and importance correction"
    )
    critic: CriticConfig | None = Field(None, description="values for GAE; None: no critic")
    length: AnyPenalty = Field(NoPenalty(), description="penalty on the length of a response")
    teacher: TeacherConfig | None = Field(
        None, description="a model to distil from; None: no teacher"
    )
    reward_model: RewardModelConfig | None = Field(
        None, description="a learned reward; None: the task's reward only"
    )
    train: TrainConfig = Field(TrainConfig(), description="optimisation of the policy")
    validation: ValidationConfig = Field(
        ValidationConfig(), description="evaluation on held-out prompts"
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="saved states of the run")
    log: LogConfig = Field(LogConfig(), description="records in addition to the metrics")
    loop: AnyLoop = Field(LaggedLoop(), description="order of sampling and learning in time")
    buffer: BufferConfig | None = Field(None, description="replay of groups; None: no replay")
    runtime: AnyRuntime = Field(LocalRuntime(), description="processes that a run consists of")
    mesh: MeshConfig = Field(MeshConfig(), description="ranks that learn together")

    @property
    def is_stale(self) -> bool:
        """Whether a rollout may reach the learner after the policy has changed, because of a lag or
        a replay buffer."""
        lag = self.loop.max_lag if isinstance(self.loop, FreeLoop) else self.loop.lag
        return lag > 0 or self.buffer is not None

    @property
    def is_rewarded(self) -> bool:
        """Whether responses get a reward, from a task or from a reward model."""
        rewards = [getattr(task, "reward", None) for task in self.tasks.values()]
        return self.reward_model is not None or any(name != "none" for name in rewards)

    @property
    def is_validated(self) -> bool:
        """Whether the run is validated. It is not if task.validation_rows = 0, in a mixture for
        each of its tasks."""
        return any(getattr(task, "is_validated", True) for task in self.tasks.values())

    @property
    def target_metric(self) -> str | None:
        """The validation metric that selects the best checkpoint and ends the run early.

        By default, it is the loss in a supervised run and otherwise the reward. It is None if the
        run is not validated, or if it samples and has no reward; then the last checkpoint is used.
        """
        if not self.is_validated:
            return None
        default = "validation/reward" if self.is_rewarded else None
        default = "validation/loss" if self.is_supervised else default
        return self.validation.metric or default

    @property
    def is_lower_better(self) -> bool:
        """Whether lower values of ``target_metric`` are better."""
        goal = self.validation.goal
        return self.target_metric == "validation/loss" if goal is None else goal == "min"

    @property
    def on_mesh(self) -> bool:
        """Whether the learner is a mesh of ranks; with torchrun, even one rank is a mesh."""
        name = self.runtime.name
        return name == "torchrun" or (name == "ray" and self.mesh.ranks > 1)

    @property
    def ranks(self) -> int:
        """Number of ranks that learn together; 1 without a mesh."""
        return self.mesh.ranks if self.on_mesh else 1

    @property
    def frozen_models(self) -> dict[str, LanguageConfig]:
        """The teacher and the reward model, by the setting that names each; without the models that
        the recipe does not have."""
        names = {
            "teacher.model": self.teacher and self.teacher.model,
            "reward_model.name": self.reward_model and self.reward_model.name,
        }
        head = self.model.fp32_head
        return {s: LanguageConfig(name=name, fp32_head=head) for s, name in names.items() if name}

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a response: rollout.stop, and the closing tag of tagged answers."""
        questions = (task for task in self.tasks.values() if isinstance(task, QuestionTask))
        tagged = any(task.answer_format == "r1_zero" for task in questions)
        return tuple(dict.fromkeys([*self.rollout.stop, *["</answer>"] * tagged]))

    @property
    def parts(self) -> dict[str, Any]:
        """The tasks of a mixture by name; a single task has the name ""."""
        return self.task.tasks if isinstance(self.task, MixtureTask) else {"": self.task}

    @property
    def tasks(self) -> dict[str, Any]:
        """The same tasks as ``parts``, by their section: "task.tasks.NAME" in a mixture, otherwise
        "task"."""
        return {f"task.tasks.{name}" if name else "task": t for name, t in self.parts.items()}

    @property
    def source(self) -> str:
        """Name of the model whose files are read; "" if the model has no files."""
        return self.model.files

    @property
    def prompts_per_rollout(self) -> int:
        return self.rollout.prompts

    @property
    def train_batches(self) -> int:
        """Number of train batches per rollout."""
        return self.rollout.batch // self.train.batch

    @property
    def gradient_steps_per_rollout(self) -> int:
        return self.train_batches * self.train.epochs

    @property
    def gradient_steps(self) -> int:
        """Number of gradient steps of the run; in a supervised run, a step is a gradient step."""
        if self.is_supervised:
            return self.train.steps
        return self.train.steps * self.gradient_steps_per_rollout

    @property
    def is_supervised(self) -> bool:
        """Whether the run learns from given answers, so that nothing is sampled or graded."""
        return isinstance(self.task, SupervisedTask)

    @property
    def decay_steps(self) -> int | None:
        """Gradient steps until the learning rate is lowest; None if the schedule is constant."""
        if self.train.schedule == "constant":
            return None
        return self.train.decay_steps or self.gradient_steps

    @property
    def steps_to_lowest(self) -> int | None:
        """Gradient steps after which the learning rate is lowest, also if the warm-up is longer
        than the decay; None if the schedule is constant."""
        decay = self.decay_steps
        return None if decay is None else max(decay, self.train.warmup_steps + 1)

    @property
    def idle_steps(self) -> int:
        """Number of gradient steps, the last ones of the run, whose learning rate is 0."""
        lowest = self.steps_to_lowest
        if lowest is None or self.train.final_share or self.is_supervised:
            return 0
        return max(0, self.gradient_steps - lowest)
