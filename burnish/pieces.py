"""What a recipe can name: each piece of an objective, its formula, and the settings it reads.

Objectives are composed: advantage × ratio × loss × reduction × KL × importance. The functions
behind the names are in ``rl/``; ``learner/objective.py`` puts them together. This file loads no
torch, so that ``burnish plan`` can print an objective, and refuse a setting without effect, before
anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from burnish.config import ObjectiveConfig


class Piece(NamedTuple):
    formula: Callable[[ObjectiveConfig], str]
    settings: tuple[str, ...] = ()
    """Fields of ``ObjectiveConfig`` that have an effect with this piece."""


ADVANTAGES = {
    "raw": Piece(lambda c: "A_i = r_i"),
    "group_mean": Piece(lambda c: "A_i = r_i − mean_g(r)"),
    "group_zscore": Piece(
        lambda c: f"A_i = (r_i − mean_g(r)) / (std_g(r) + {c.advantage_eps:g})", ("advantage_eps",)
    ),
    "leave_one_out": Piece(lambda c: "A_i = r_i − mean of the other r of the group"),
    "best_of_group": Piece(
        lambda c: f"A_i = {'(r_i − mean_g(r))' if c.centered else 'r_i'} [r_i = max_g(r)]",
        ("centered",),
    ),
    "reinforce_plus_plus": Piece(
        lambda c: f"A_t = whiten over the batch of R_t,  R_t = r_t + {c.gamma:g} R_(t+1)",
        ("gamma",),
    ),
    "reinforce_plus_plus_baseline": Piece(
        lambda c: "A_(i,t) = whiten over the batch of r_i − mean_g(r)"
    ),
}

RATIOS = {
    "token": Piece(lambda c: "ρ_t = exp(log π − log π_prox)"),
    "sequence": Piece(
        lambda c: "ρ_t = exp(mean over the response of log π − log π_prox), own gradient per token"
    ),
}

LOSSES = {
    "reinforce": Piece(lambda c: "L_t = −A_t log π"),
    "unclipped": Piece(lambda c: "L_t = −A_t ρ_t", ("ratio", "proximal")),
    "clip": Piece(
        lambda c: (
            f"L_t = −min(ρ_t A_t, clip(ρ_t, {1 - c.clip_low:g}, {1 + c.clip_high:g}) A_t)"
            + ("" if c.dual_clip is None else f", at most −{c.dual_clip:g} A_t where A_t < 0")
        ),
        ("ratio", "proximal", "clip_low", "clip_high", "dual_clip"),
    ),
    "cispo": Piece(
        lambda c: f"L_t = −sg[clip(ρ_t, {c.cispo_floor:g}, {c.cispo_cap:g})] A_t log π",
        ("ratio", "proximal", "cispo_floor", "cispo_cap"),
    ),
}

REDUCTIONS = {
    "sequence_mean": Piece(lambda c: "w_(i,t) = 1 / (S |y_i|)"),
    "token_mean": Piece(lambda c: "w_(i,t) = 1 / Σ_i |y_i|"),
    "constant": Piece(lambda c: f"w_(i,t) = 1 / (S · {c.constant_length})", ("constant_length",)),
}

_KL_SETTINGS = ("kl_coefficient", "kl_in", "kl_refresh")
KLS = {
    "none": Piece(lambda c: ""),
    "k1": Piece(lambda c: "k1 = x", _KL_SETTINGS),
    "k2": Piece(lambda c: "k2 = ½ x²", _KL_SETTINGS),
    "k3": Piece(lambda c: "k3 = exp(−x) + x − 1", _KL_SETTINGS),
}

_IMPORTANCE_SETTINGS = ("proximal", "importance_level", "importance_low", "importance_high")
IMPORTANCES = {
    "none": Piece(lambda c: ""),
    "truncate": Piece(
        lambda c: f"v = clip(v, {c.importance_low:g}, {c.importance_high:g})", _IMPORTANCE_SETTINGS
    ),
    "mask": Piece(
        lambda c: f"v = v [{c.importance_low:g} ≤ v ≤ {c.importance_high:g}]", _IMPORTANCE_SETTINGS
    ),
}

KINDS = {
    "advantage": ADVANTAGES,
    "ratio": RATIOS,
    "loss": LOSSES,
    "reduction": REDUCTIONS,
    "kl": KLS,
    "importance": IMPORTANCES,
}


def settings_of(config: ObjectiveConfig) -> set[str]:
    """The fields that have an effect with the pieces that ``config`` names."""
    used = {*KINDS, "entropy_coefficient"} - {"ratio"}
    if reads_proximal_first(config):
        used.add("proximal")
    for kind, pieces in KINDS.items():
        used.update(pieces[getattr(config, kind)].settings)
    return used


def reads_proximal_first(config: ObjectiveConfig) -> bool:
    """Whether the proximal policy's log-probabilities are read before the first gradient step.

    An importance correction and a KL in the reward read them then. A loss reads them in the step,
    and at the first step the proximal policy is the policy that is differentiated.
    """
    in_reward = config.kl != "none" and config.kl_in == "reward"
    return in_reward or "proximal" in IMPORTANCES[config.importance].settings


def users_of(setting: str) -> list[str]:
    """Where a setting would have an effect, as "loss = 'clip'"."""
    return [
        f"{kind} = '{name}'"
        for kind, pieces in KINDS.items()
        for name, piece in pieces.items()
        if setting in piece.settings
    ]


def formula(config: ObjectiveConfig) -> list[tuple[str, str]]:
    """The objective in lines of (what, formula)."""
    in_loss = config.kl != "none" and config.kl_in == "loss"
    coefficient = f"{config.kl_coefficient:g}"
    term = "L_t" if config.importance == "none" else "v_t L_t"
    term += f" + {coefficient} {config.kl}_t" if in_loss else ""
    term += f" − {config.entropy_coefficient:g} H_t" if config.entropy_coefficient else ""
    lines = [("loss", f"Σ w_(i,t) ({term})" if " " in term else f"Σ w_(i,t) {term}")]
    lines.append(("objective", LOSSES[config.loss].formula(config)))
    if "ratio" in settings_of(config):
        lines.append(("ratio", RATIOS[config.ratio].formula(config)))
        lines.append(("proximal", f"π_prox: {PROXIMALS[config.proximal]}"))
    lines.append(("advantage", ADVANTAGES[config.advantage].formula(config)))
    lines.append(("denominator", REDUCTIONS[config.reduction].formula(config)))
    if config.kl != "none":
        kl = f"{KLS[config.kl].formula(config)},  x = log π − log π_ref"
        if config.kl_in == "reward":
            kl += f",  r ← r − {coefficient} Σ_t {config.kl}_t"
        lines.append(("KL", kl))
        every = config.kl_refresh
        reference = "the initial model" if every is None else f"refreshed every {every} steps"
        lines.append(("reference", f"π_ref: {reference}"))
    if config.importance != "none":
        weight = f"v = π_prox / π_behavior per {config.importance_level}"
        lines.append(("importance", f"{weight},  {IMPORTANCES[config.importance].formula(config)}"))
    return lines


PROXIMALS = {
    "behavior": "the sampler's own log-probabilities",
    "recompute": "the learner's own at the start of the batch",
}
