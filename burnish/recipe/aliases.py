"""Names of settings in TRL, verl and PEFT, and the settings of burnish that have their meaning.

Also names of published algorithms, and the loss, advantage and preset that they are in burnish.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Alias(NamedTuple):
    """A setting of another system."""

    system: str
    setting: str
    """The setting of burnish."""
    note: str = ""
    """The difference in meaning or in values; "" if there is none."""


_ADVANTAGES = (
    "grpo is 'group_zscore', rloo is 'leave_one_out', and gae, remax, opo and gdpo have the same "
    "names"
)
_REWARDS = "the reward is FILE.py:NAME with task.name = 'files', or --reward, or reward= in Python"
_BATCH = (
    "it counts the responses of one gradient step on all devices together, and "
    "train.micro_sequences the responses of one forward pass, which changes no result"
)
_PER_DEVICE = (
    "it is the number of responses of one forward pass on a device and changes no result; "
    "train.batch, the responses of one gradient step, is this times gradient_accumulation_steps "
    "times the number of devices"
)
_PROMPTS = "burnish counts responses, so multiply the number of prompts by rollout.group_size"
_STEPS = (
    "it counts rollouts; each rollout takes rollout.batch / train.batch × train.epochs gradient "
    "steps; a supervised run has task.epochs instead"
)
_LORA = "it needs train.learn.name = 'lora'"
_KL = "it needs objective.kl.name, such as 'k3'"
_KL_ON = "use 'k3' for a KL in the loss, or 'none'; objective.kl.coefficient is its weight"
_LOSS_TYPE = (
    "it chooses the weights of tokens: grpo is 'sequence_mean', bnpo and dapo are 'token_mean', "
    "dr_grpo is 'constant'; objective.loss chooses the loss, such as 'clip' or 'cispo'"
)
_PROMPT_LENGTH = (
    "prompts have no limit of their own; for generated prompts, 'cut' cuts off the beginning of "
    "a prompt that does not fit into the model's context beside rollout.max_tokens"
)
_CLIP = "set objective.loss.high as well: burnish has a bound for each side"
_WARMUP = "it is a number of gradient steps, not a share of them"
_MICRO = "it is the number of responses per forward pass on a rank"
_MEMORY = "it is a number of megabytes for keys and values, not a share of the GPU's memory"
_SCALE = (
    "'group_zscore' divides by the group's std, 'batch_std' by the batch's, 'group_mean' by none"
)
_EVERY = "it counts rollouts, not gradient steps"
_OUT = "the directory of a run is runs/NAME-1; --out, or out= in Python, names another"
_DATA = (
    "it is the name of data, such as FILE.jsonl; --data, or data= in Python, sets the training data"
)

ALIASES = {
    # TRL: GRPOConfig, TrainingArguments and PEFT's LoraConfig
    "adam_beta1": Alias("TRL", "train.betas", "it is the list of both betas"),
    "adam_epsilon": Alias("TRL", "train.eps"),
    "adam_beta2": Alias("TRL", "train.betas", "it is the list of both betas"),
    "beta": Alias("TRL", "objective.kl.coefficient", _KL),
    "bf16": Alias("TRL", "train.precision", "its value is 'bf16'"),
    "dataset_name": Alias("TRL", "task.train", "it is a file of rows; --data sets it, too"),
    "delta": Alias(
        "TRL",
        "objective.loss.dual",
        "it bounds the ratio where the advantage is negative, as in dual clip",
    ),
    "epsilon": Alias("TRL", "objective.loss.low", _CLIP),
    "epsilon_high": Alias("TRL", "objective.loss.high"),
    "eval_dataset": Alias("TRL", "task.validation", _DATA),
    "eval_strategy": Alias(
        "TRL", "validation.every", "it counts rollouts; the first and the last are always evaluated"
    ),
    "eval_steps": Alias("TRL", "validation.every", _EVERY),
    "fp16": Alias("TRL", "train.precision", "its value is 'fp16'"),
    "generation_batch_size": Alias("TRL", "rollout.batch"),
    "gradient_accumulation_steps": Alias("TRL", "train.batch", _BATCH),
    "gradient_checkpointing": Alias("TRL", "train.recompute"),
    "importance_sampling_level": Alias("TRL", "objective.ratio"),
    "learning_rate": Alias("TRL", "train.learning_rate"),
    "load_best_model_at_end": Alias(
        "TRL",
        "checkpoint.keep",
        "the best one is always kept, and `burnish export` takes it",
    ),
    "logging_steps": Alias(
        "TRL",
        "log.rollouts",
        "every step is logged, so it has no equal; log.rollouts is the number of responses that "
        "are recorded per step",
    ),
    "log_completions": Alias("TRL", "log.rollouts", "it is the number of responses per step"),
    "lora_alpha": Alias("PEFT", "train.learn.alpha", _LORA),
    "lora_r": Alias("TRL", "train.learn.rank", _LORA),
    "lora_target_modules": Alias("TRL", "train.learn.modules", _LORA),
    "loss_type": Alias("TRL", "objective.reduction", _LOSS_TYPE),
    "lr": Alias("verl", "train.learning_rate"),
    "lr_scheduler_type": Alias("TRL", "train.schedule"),
    "mask_truncated_completions": Alias("TRL", "rollout.overlong", "its value is 'mask'"),
    "max_completion_length": Alias("TRL", "rollout.max_tokens"),
    "max_grad_norm": Alias("TRL", "train.clip_norm"),
    "max_new_tokens": Alias("transformers", "rollout.max_tokens"),
    "max_prompt_length": Alias("TRL", "task.long_prompts", _PROMPT_LENGTH),
    "max_steps": Alias("TRL", "train.steps", _STEPS),
    "metric_for_best_model": Alias("TRL", "validation.metric"),
    "greater_is_better": Alias("TRL", "validation.goal", "its value is 'max' or 'min'"),
    "peft_config": Alias("TRL", "train.learn", "its name is 'lora', with rank and modules"),
    "dataset_text_field": Alias("TRL", "task.columns", "columns.prompt is the column's name"),
    "model_name_or_path": Alias("TRL", "model.name"),
    "num_generations": Alias("TRL", "rollout.group_size"),
    "num_generations_eval": Alias("TRL", "validation.samples"),
    "num_iterations": Alias("TRL", "train.epochs"),
    "num_train_epochs": Alias("TRL", "train.steps", _STEPS),
    "output_dir": Alias("TRL", "name", _OUT),
    "per_device_eval_batch_size": Alias(
        "TRL", "engine.max_running", "it is the number of samples that are decoded at once"
    ),
    "per_device_train_batch_size": Alias("TRL", "train.micro_sequences", _PER_DEVICE),
    "ref_model_sync_steps": Alias("TRL", "objective.kl.refresh", _KL),
    "remove_unused_columns": Alias(
        "TRL", "task.columns", "a reward gets all columns; it only names those of the task's fields"
    ),
    "report_to": Alias("TRL", "log.trackers", "[] is none"),
    "reward_funcs": Alias("TRL", "task.reward", _REWARDS),
    "run_name": Alias("TRL", "name", _OUT),
    "save_steps": Alias("TRL", "checkpoint.every", _EVERY),
    "save_total_limit": Alias("TRL", "checkpoint.keep"),
    "scale_rewards": Alias("TRL", "objective.advantage", _SCALE),
    "steps_per_generation": Alias(
        "TRL",
        "rollout.batch",
        "the number of gradient steps is rollout.batch / train.batch × train.epochs",
    ),
    "ref_model_mixup_alpha": Alias(
        "TRL", "objective.kl.ema", "it is the old reference's share; it needs objective.kl.name"
    ),
    "reward_weights": Alias(
        "TRL", "task.rewards", "it is a list of tables with reward, weight and name"
    ),
    "sync_ref_model": Alias(
        "TRL",
        "objective.kl.refresh",
        "it is the number of steps between two references, and objective.kl.ema averages the "
        "reference instead; both need objective.kl.name",
    ),
    "target_modules": Alias("PEFT", "train.learn.modules", _LORA),
    "train_dataset": Alias("TRL", "task.train", _DATA),
    "use_bias_correction_kl": Alias(
        "TRL", "objective.kl", "its value is 'k2', whose gradient on-policy is the corrected term's"
    ),
    "use_cpu": Alias("TRL", "device", "its value is 'cpu'"),
    "use_vllm": Alias("TRL", "engine.name", "its value is 'vllm'"),
    "vllm_gpu_memory_utilization": Alias("TRL", "engine.kv_mb", _MEMORY),
    "vllm_importance_sampling_cap": Alias(
        "TRL", "objective.importance.high", "it needs objective.importance.name = 'truncate'"
    ),
    "vllm_importance_sampling_correction": Alias(
        "TRL",
        "objective.importance",
        "use 'truncate' or 'mask', and objective.proximal = 'recompute'",
    ),
    "warmup_ratio": Alias("TRL", "train.warmup_steps", _WARMUP),
    # verl; the part of a name before these parts does not matter
    "actor.clip_ratio": Alias("verl", "objective.loss.low", _CLIP),
    "adv_estimator": Alias("verl", "objective.advantage", _ADVANTAGES),
    "clip_ratio": Alias("verl", "objective.loss.low", _CLIP),
    "clip_ratio_c": Alias("verl", "objective.loss.dual"),
    "clip_ratio_high": Alias("verl", "objective.loss.high"),
    "clip_ratio_low": Alias("verl", "objective.loss.low"),
    "critic.optim.lr": Alias("verl", "critic.learning_rate"),
    "data.train_batch_size": Alias("verl", "rollout.batch", _PROMPTS),
    "enable_gradient_checkpointing": Alias("verl", "train.recompute"),
    "entropy_coeff": Alias("verl", "objective.entropy_coefficient"),
    "experiment_name": Alias("verl", "name"),
    "filter_groups.enable": Alias("verl", "selection.dead_groups", "its value is 'dynamic'"),
    "gpu_memory_utilization": Alias("verl", "engine.kv_mb", _MEMORY),
    "grad_clip": Alias("verl", "train.clip_norm"),
    "kl_coef": Alias("verl", "objective.kl.coefficient", _KL),
    "kl_loss_coef": Alias("verl", "objective.kl.coefficient", _KL),
    "kl_loss_type": Alias(
        "verl",
        "objective.kl",
        "low_var_kl is 'k3', mse is 'k2'; kl is 'k1', which burnish accepts only in the reward",
    ),
    "lora_rank": Alias("verl", "train.learn.rank", _LORA),
    "loss_agg_mode": Alias(
        "verl",
        "objective.reduction",
        "token-mean is 'token_mean', "
        "seq-mean-token-mean is 'sequence_mean', seq-mean-token-sum-norm is "
        "'constant'",
    ),
    "lr_warmup_steps": Alias("verl", "train.warmup_steps"),
    "lr_warmup_steps_ratio": Alias("verl", "train.warmup_steps", _WARMUP),
    "max_num_gen_batches": Alias(
        "verl", "selection.max_asked", "it counts groups per group of a rollout, not batches"
    ),
    "max_response_length": Alias("verl", "rollout.max_tokens"),
    "model.path": Alias("verl", "model.name"),
    "norm_adv_by_std_in_grpo": Alias("verl", "objective.advantage", _SCALE),
    "ppo_epochs": Alias("verl", "train.epochs"),
    "ppo_max_token_len_per_gpu": Alias("verl", "train.micro_tokens"),
    "ppo_micro_batch_size": Alias("verl", "train.micro_sequences", _MICRO),
    "ppo_micro_batch_size_per_gpu": Alias("verl", "train.micro_sequences", _MICRO),
    "ppo_mini_batch_size": Alias("verl", "train.batch", _PROMPTS),
    "reward_function.path": Alias("verl", "task.reward", _REWARDS),
    "rollout.n": Alias("verl", "rollout.group_size"),
    "save_freq": Alias("verl", "checkpoint.every", _EVERY),
    "test_freq": Alias("verl", "validation.every", _EVERY),
    "total_epochs": Alias("verl", "train.steps", _STEPS),
    "total_training_steps": Alias("verl", "train.steps", _STEPS),
    "train_batch_size": Alias("verl", "rollout.batch", _PROMPTS),
    "train_files": Alias("verl", "task.train"),
    "use_kl_in_reward": Alias(
        "verl", "objective.kl.where", "its value is 'reward', and it needs objective.kl.name"
    ),
    "use_kl_loss": Alias("verl", "objective.kl", _KL_ON),
    "val_files": Alias("verl", "task.validation"),
    "val_kwargs.n": Alias("verl", "validation.samples"),
}
"""Settings of other systems by name."""


class Algorithm(NamedTuple):
    """A published algorithm: its name, its loss and advantage, and the preset with all its
    settings."""

    title: str
    loss: str
    advantage: str
    preset: str = ""
    """"" if there is no preset: the algorithm's loss and advantage suffice."""


ALGORITHMS = {
    "grpo": Algorithm("GRPO", "clip", "group_zscore"),
    "dapo": Algorithm("DAPO", "clip", "group_zscore", "dapo"),
    "drgrpo": Algorithm("Dr. GRPO", "clip", "group_mean", "dr-grpo"),
    "gspo": Algorithm("GSPO", "clip", "group_zscore", "gspo"),
    "minimax": Algorithm("MiniMax-M1", "cispo", "group_zscore", "minimax"),
    "olmo3": Algorithm("OLMo 3", "clip", "group_mean", "olmo3"),
    "ppo": Algorithm("PPO", "clip", "gae", "ppo"),
    "reinforce++": Algorithm("REINFORCE++", "clip", "reinforce_plus_plus", "reinforce-plus-plus"),
    "rloo": Algorithm("RLOO", "reinforce", "leave_one_out", "rloo"),
    "scalerl": Algorithm("ScaleRL", "cispo", "batch_std", "scalerl"),
    "vineppo": Algorithm("VinePPO", "clip", "vine", "vineppo"),
}
"""Published algorithms by name, in lower case, without separators and with "+" for "plus"."""


def explain_algorithm(name: str) -> str | None:
    """Return a sentence with the loss and the advantage of a published algorithm; None if the name
    is unknown. Case and separators do not matter."""
    found = ALGORITHMS.get(re.sub(r"[-_. ]", "", name.lower()).replace("plus", "+"))
    if found is None:
        return None
    whole = "`burnish recipes` lists presets, which set whole algorithms"
    if found.preset:
        whole = f"preset = {found.preset!r} sets the whole algorithm"
    return f"{found.title}'s loss is {found.loss!r} and its advantage {found.advantage!r}; {whole}"


def find_alias(key: str) -> Alias | None:
    """Return the alias for another system's setting ``key``; None if the key is unknown.

    The longest end of the key that is a name in ``ALIASES`` decides, so that
    "actor_rollout_ref.rollout.n" is "rollout.n".
    """
    return ALIASES.get(_name_in(key))


def explain_alias(key: str) -> str | None:
    """Return a sentence with burnish's setting for another system's ``key``; None if the key is
    unknown."""
    if (alias := find_alias(key)) is None:
        return None
    system, setting, note = alias
    return f"{system}'s {_name_in(key)} is {setting}{f': {note}' if note else ''}"


def _name_in(key: str) -> str:
    parts = key.split(".")
    ends = (".".join(parts[cut:]) for cut in range(len(parts)))
    return next((end for end in ends if end in ALIASES), "")
