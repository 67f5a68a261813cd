"""Golden vectors: float64 results of verl 0.9.1, TRL 1.16.0 and OpenRLHF 0.11.2 on fixed inputs.

``oracles/loss_vectors.json`` says which call of which library made each. Agreement is to 1e-7.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from burnish.rl import advantages, kl, losses, ratios, reduce
from burnish.rl.sequences import on_last_action, to_tokens

FOLDER = Path(__file__).parent / "oracles"
EXPECTED = np.load(FOLDER / "loss_vectors_expected.npz")
INPUTS = {k: torch.from_numpy(v) for k, v in np.load(FOLDER / "loss_vectors_inputs.npz").items()}
MASK = INPUTS["mask"]
CHECKED: set[str] = set()


def check(name, **outputs):
    CHECKED.add(name)
    for key, value in outputs.items():
        expected = torch.from_numpy(np.asarray(EXPECTED[f"{name}/{key}"]))
        torch.testing.assert_close(value.detach().double(), expected, rtol=0, atol=1e-7)


def masked_mean(x):
    return reduce.weighted_sum(x.double(), reduce.token_mean(MASK))


def check_loss(name, loss_fn, **more):
    """Loss and gradient with respect to the policy's log-probabilities."""
    new = INPUTS["new"].clone().requires_grad_()
    loss = loss_fn(new)
    loss.backward()
    check(name, loss=loss, grad=new.grad, **more)


def on_tokens(per_sequence):
    return to_tokens(per_sequence, MASK)


# Advantages


def test_gae():
    adv, returns = advantages.gae(INPUTS["tokrew"], INPUTS["values"], MASK, gamma=1.0, lam=1.0)
    whitened = advantages.whiten(adv, MASK)
    name = "adv_gae_g1_l1"
    CHECKED.add(name)
    for got, key in ((whitened, "advantages_whitened"), (returns, "returns")):
        expected = torch.from_numpy(EXPECTED[f"{name}/{key}"])
        torch.testing.assert_close(got * MASK, expected * MASK, rtol=0, atol=1e-7)


def test_group_estimators():
    rewards, groups = INPUTS["rew2"], INPUTS["group_index"]
    check("adv_grpo_std", adv=on_tokens(advantages.group_zscore(rewards, groups, eps=1e-6)))
    constant = advantages.group_zscore(INPUTS["rew"], groups, eps=1e-6)
    check("adv_grpo_constant_group", adv=on_tokens(constant))
    check("adv_rloo", adv=on_tokens(advantages.leave_one_out(rewards, groups)))
    baseline = advantages.reinforce_plus_plus_baseline(rewards, groups, MASK)
    check("adv_reinforce_pp_baseline", adv=baseline)


def test_token_rewards_are_the_sequence_rewards_on_the_last_action():
    assert torch.equal(on_last_action(INPUTS["rew2"], MASK), INPUTS["tokrew"])


def test_whiten():
    check("masked_whiten", w=advantages.whiten(INPUTS["adv_tok"], MASK))


# Reductions


def test_reductions():
    x = INPUTS["adv_tok"]
    check("agg_token-mean", loss=reduce.weighted_sum(x, reduce.token_mean(MASK)))
    check("agg_seq-mean-token-sum", loss=reduce.weighted_sum(x, reduce.constant(MASK, length=1)))
    check("agg_seq-mean-token-mean", loss=reduce.weighted_sum(x, reduce.sequence_mean(MASK)))
    empty = MASK.clone()
    empty[2] = 0
    weights = reduce.sequence_mean(empty)
    check("agg_emptyrow_seq-mean-token-mean", loss=reduce.weighted_sum(x, weights))
    sft = reduce.weighted_sum(
        losses.reinforce(INPUTS["old"], torch.ones(())), reduce.token_mean(MASK)
    )
    check("orl_sft", loss=sft)


# KL, entropy, values, importance


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl(name):
    new = INPUTS["new"].clone().requires_grad_()
    cap = {"cap": 10.0} if name == "k3" else {}
    value = getattr(kl, name)(new, INPUTS["ref"], **cap)
    (value * MASK).sum().backward()
    check(f"kl_{name}", kl=value, grad=new.grad)


def test_entropy_and_logprobs():
    check("entropy", ent=losses.entropy(INPUTS["logits"]))
    logprobs = torch.log_softmax(INPUTS["logits"], -1)
    check("logprobs", lp=logprobs.gather(-1, INPUTS["labels"][..., None]).squeeze(-1))


def test_value_loss():
    predicted = INPUTS["vpred"].clone().requires_grad_()
    per_token = losses.value_loss(predicted, INPUTS["values"], INPUTS["returns"], clip=0.2)
    loss = reduce.weighted_sum(per_token, reduce.token_mean(MASK))
    loss.backward()
    check("value_loss_clip.2", loss=loss, grad=predicted.grad)


def test_truncated_importance():
    weights = ratios.importance_ratio(INPUTS["old"], INPUTS["rollout"], MASK)
    truncated = ratios.truncate(weights, high=2.0)
    CHECKED.add("tis_token")
    expected = torch.from_numpy(EXPECTED["tis_token/w"])
    torch.testing.assert_close(truncated * MASK, expected * MASK, rtol=0, atol=1e-7)


# Whole losses


def clip_loss(new, weights, advantages, importance=1.0, **bounds):
    per_token = losses.clipped(ratios.token_ratio(new, INPUTS["old"]), advantages, **bounds)
    return reduce.weighted_sum(importance * per_token, weights)


def test_dual_clip():
    adv, bounds = INPUTS["adv_seq"][:, None], {"low": 0.2, "high": 0.2}
    ratio = ratios.token_ratio(INPUTS["new"], INPUTS["old"])
    clipped = losses.is_clipped(ratio, adv, **bounds)
    dual = losses.is_dual_clipped(ratio, adv, dual=1.5)
    check_loss(
        "pg_vanilla_dualclip1.5",
        lambda new: clip_loss(new, reduce.token_mean(MASK), adv, dual=1.5, **bounds),
        pg_clipfrac=masked_mean(clipped),
        pg_clipfrac_lower=masked_mean(dual),
        ppo_kl=-masked_mean(INPUTS["new"] - INPUTS["old"]),
    )


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("trl_grpo", reduce.sequence_mean(MASK)),
        ("trl_dr_grpo", reduce.constant(MASK, length=12)),
        ("trl_dapo", reduce.token_mean(MASK)),
    ],
)
def test_trl_losses(name, weights):
    adv = INPUTS["adv_seq"][:, None]
    check_loss(name, lambda new: clip_loss(new, weights, adv, low=0.2, high=0.2))


def test_gspo():
    def loss(new):
        ratio = ratios.sequence_ratio(new, INPUTS["old"], MASK)
        per_token = losses.clipped(ratio, INPUTS["adv_seq"][:, None], low=3e-4, high=4e-4)
        return reduce.weighted_sum(per_token, reduce.sequence_mean(MASK))

    check_loss("trl_gspo", loss)


def test_cispo():
    def loss(new):
        ratio = ratios.token_ratio(new, INPUTS["old"])
        per_token = losses.cispo(new, ratio, INPUTS["adv_seq"][:, None], cap=5.0)
        return reduce.weighted_sum(per_token, reduce.token_mean(MASK))

    check_loss("trl_cispo_max5", loss)


def test_openrlhf_losses():
    adv, bounds = INPUTS["adv_seq"][:, None], {"low": 0.2, "high": 0.2}
    token, sequence = reduce.token_mean(MASK), reduce.sequence_mean(MASK)
    ratio = ratios.token_ratio(INPUTS["new"], INPUTS["old"])
    more = {
        "clip_ratio": masked_mean(losses.is_clipped(ratio, adv, **bounds)),
        "ppo_kl": -masked_mean(INPUTS["new"] - INPUTS["old"]),
    }
    check_loss("orl_ppo_token", lambda new: clip_loss(new, token, adv, **bounds), **more)
    check_loss("orl_ppo_seq", lambda new: clip_loss(new, sequence, adv, **bounds), **more)
    weights = ratios.importance_ratio(INPUTS["old"], INPUTS["rollout"], MASK)
    weights = ratios.truncate(weights, low=0.8, high=1.25)
    check_loss("orl_is_tis", lambda new: clip_loss(new, token, adv, weights, **bounds), **more)


def test_every_vector_was_checked():
    rows = json.loads((FOLDER / "loss_vectors.json").read_text())
    assert {row["name"] for row in rows} == CHECKED
