"""The published functions: hand-derived values, and agreement with plain per-row arithmetic."""

import math
from types import SimpleNamespace

import pytest
import torch

from burnish import grpo


def close(got, expected, atol=1e-6):
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol, equal_nan=True)


def reward_fn(response, ground_truth):
    right = float(response == ground_truth)
    return {"reward": right + 0.5, "format_reward": 1.0, "answer_reward": right}


def test_group_normalized_rewards():
    responses, truths = ["a", "b", "c", "a"], ["a", "a", "a", "a"]
    adv, raw, meta = grpo.compute_group_normalized_rewards(
        reward_fn, responses, truths, 2, 0.1, False
    )
    close(raw, [1.5, 0.5, 0.5, 1.5])
    close(adv, [0.5, -0.5, -0.5, 0.5])
    assert meta["reward_mean"] == 1.0
    assert (meta["reward_max"], meta["reward_min"]) == (1.5, 0.5)
    assert (meta["format_reward_mean"], meta["answer_reward_mean"]) == (1.0, 0.5)
    scaled, _, _ = grpo.compute_group_normalized_rewards(reward_fn, responses, truths, 2, 0.1, True)
    close(scaled, adv / (0.5**0.5 + 0.1))


@pytest.mark.parametrize("reward", [0.7, 100.1, 1e-30])
@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_equal_rewards_give_exactly_nothing(reward, by_std, eps):
    advantages, _, _ = grpo.compute_group_normalized_rewards(
        lambda response, truth: {"reward": reward}, ["a"] * 32, ["a"] * 32, 16, eps, by_std
    )
    assert advantages.tolist() == [0.0] * 32


def test_group_normalized_rewards_refuses_what_does_not_divide():
    with pytest.raises(ValueError, match="got 3 responses and group_size 2"):
        grpo.compute_group_normalized_rewards(reward_fn, ["a"] * 3, ["a"] * 3, 2, 1e-6, True)
    with pytest.raises(ValueError, match="shorter"):
        grpo.compute_group_normalized_rewards(reward_fn, ["a"] * 2, ["a"], 2, 1e-6, True)


def test_naive_loss_broadcasts_over_tokens():
    loss = grpo.compute_naive_policy_gradient_loss(
        torch.tensor([[2.0], [-1.0]]), torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    )
    close(loss, [[2.0, 4.0], [-3.0, -4.0]])


def test_grpo_clip_loss():
    new = torch.log(torch.tensor([[1.5, 1.0], [0.5, 1.5]]))
    loss, meta = grpo.compute_grpo_clip_loss(
        torch.tensor([[2.0], [-2.0]]), new, torch.zeros(2, 2), 0.2
    )
    close(loss, [[-2.4, -2.0], [1.6, 3.0]])
    assert meta["clipped"].tolist() == [[True, False], [True, False]]
    close(meta["clip_fraction"], 0.5)
    close(meta["ratio"], [[1.5, 1.0], [0.5, 1.5]])


def test_policy_gradient_loss_dispatches():
    new, old = torch.full((1, 2), -1.0), torch.full((1, 2), -1.5)
    rewards, adv = torch.tensor([[3.0]]), torch.tensor([[2.0]])
    given = {"raw_rewards": rewards, "advantages": adv, "old_log_probs": old, "cliprange": 0.2}
    close(grpo.compute_policy_gradient_loss(new, "no_baseline", **given)[0], [[3.0, 3.0]])
    baseline, _ = grpo.compute_policy_gradient_loss(new, "reinforce_with_baseline", **given)
    close(baseline, [[2.0, 2.0]])
    clip, meta = grpo.compute_policy_gradient_loss(new, "grpo_clip", **given)
    close(clip, [[-2.4, -2.4]])
    assert meta["clip_fraction"] == 1.0


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
        ("grpo_clip", "advantages"),
        ("grpo_clip", "old_log_probs"),
        ("grpo_clip", "cliprange"),
    ],
)
def test_a_missing_argument_is_named_with_its_loss(loss_type, missing):
    one = torch.ones(1, 1)
    given = {"raw_rewards": one, "advantages": one, "old_log_probs": one, "cliprange": 0.1}
    del given[missing]
    with pytest.raises(ValueError, match=f"'{loss_type}' needs {missing}"):
        grpo.compute_policy_gradient_loss(one, loss_type, **given)


def test_an_unknown_loss_type_is_refused():
    with pytest.raises(ValueError, match="got 'ppo'"):
        grpo.compute_policy_gradient_loss(torch.ones(1, 1), "ppo")


def test_masked_mean_and_normalize():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    close(grpo.masked_mean(x, mask), 2.0)
    close(grpo.masked_mean(x, mask, dim=1), [2.0, math.nan])
    close(grpo.masked_mean(x, mask, dim=0), [1.0, math.nan, 3.0])
    close(grpo.masked_normalize(x, mask, normalize_constant=2.0), 2.0)
    close(grpo.masked_normalize(x, mask, dim=1, constant_normalizer=8.0), [0.5, 0.0])
    close(grpo.masked_normalize(x, mask, dim=-1), [4.0, 0.0])


def test_masked_mean_against_masked_normalize_on_4_and_7_tokens():
    """The mean gives a short response's tokens more weight; a constant gives all the same."""
    mask = torch.arange(7)[None] < torch.tensor([[4], [7]])
    logprobs = torch.ones(2, 7, requires_grad=True)
    grpo.masked_mean(logprobs, mask, dim=1).mean().backward()
    close(logprobs.grad, [[1 / 4 / 2] * 4 + [0] * 3, [1 / 7 / 2] * 7])
    logprobs.grad = None
    grpo.masked_normalize(logprobs, mask, dim=1, constant_normalizer=7.0).mean().backward()
    close(logprobs.grad, [[1 / 7 / 2] * 4 + [0] * 3, [1 / 7 / 2] * 7])


def microbatch():
    torch.manual_seed(0)
    new = torch.randn(4, 5, requires_grad=True)
    old = new.detach() + 0.3 * torch.randn(4, 5)
    mask = torch.arange(5)[None] < torch.tensor([[5], [2], [1], [4]])
    return new, old, mask, torch.randn(4, 1)


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip"])
def test_grpo_microbatch_train_step_equals_rows_one_by_one(loss_type):
    new, old, mask, adv = microbatch()
    given = {"raw_rewards": adv, "advantages": adv, "old_log_probs": old, "cliprange": 0.1}
    loss, _ = grpo.grpo_microbatch_train_step(new, mask, 4, loss_type, **given)
    plain = new.detach().clone().requires_grad_()
    rows = []
    for i in range(4):
        tokens = plain[i, mask[i]]
        ratio = (tokens - old[i, mask[i]]).exp()
        a = adv[i]
        if loss_type == "grpo_clip":
            rows.append(-torch.minimum(ratio * a, ratio.clamp(0.9, 1.1) * a).mean())
        else:
            rows.append(-(a * tokens).mean())
    expected = sum(rows) / 4 / 4
    expected.backward()
    close(loss, expected.detach())
    close(new.grad, plain.grad)


def test_gradients_accumulate():
    new, _, mask, adv = microbatch()
    grpo.grpo_microbatch_train_step(new, mask, 2, "reinforce_with_baseline", advantages=adv)
    once = new.grad.clone()
    grpo.grpo_microbatch_train_step(new, mask, 2, "reinforce_with_baseline", advantages=adv)
    close(new.grad, 2 * once)


def test_sft_microbatch_train_step():
    new, _, mask, _ = microbatch()
    loss, _ = grpo.sft_microbatch_train_step(new, mask, 3, normalize_constant=2.0)
    close(loss, -(new.detach() * mask).sum() / 2 / 4 / 3)
    close(new.grad, -mask.float() / 2 / 4 / 3)


def test_log_probs_and_entropy():
    logits = torch.log(torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]))
    result = grpo.get_response_log_probs(
        lambda ids: SimpleNamespace(logits=logits),
        torch.tensor([[0, 1]]),
        torch.tensor([[1, 0]]),
        return_token_entropy=True,
    )
    close(result["log_probs"], [[math.log(0.75), math.log(0.5)]])
    close(
        result["token_entropy"], [[-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)]]
    )
    bare = grpo.get_response_log_probs(
        lambda ids: SimpleNamespace(logits=logits), torch.zeros(1, 2), torch.zeros(1, 2).long()
    )
    assert set(bare) == {"log_probs"}


class Letters:
    """A tokenizer of letters: a = 1, b = 2, …"""

    def __init__(self, pad_token_id=0, eos_token_id=99):
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return [ord(c) - 96 for c in text]


def test_tokenize_prompt_and_output():
    got = grpo.tokenize_prompt_and_output(["abc", "d"], ["ef", "ghi"], Letters())
    assert got["input_ids"].tolist() == [[1, 2, 3, 5], [4, 7, 8, 9]]
    assert got["labels"].tolist() == [[2, 3, 5, 6], [7, 8, 9, 0]]
    assert got["response_mask"].tolist() == [[False, False, True, True], [True, True, True, False]]


@pytest.mark.parametrize(("pad", "eos", "filled"), [(None, 99, 99), (None, None, 0), (7, 99, 7)])
def test_padding_falls_back_on_the_end_token(pad, eos, filled):
    got = grpo.tokenize_prompt_and_output(["a", "a"], ["b", "bc"], Letters(pad, eos))
    assert got["labels"][0, -1] == filled


def test_tokenize_refuses_unequal_counts():
    with pytest.raises(ValueError, match="shorter"):
        grpo.tokenize_prompt_and_output(["a", "b"], ["c"], Letters())


def test_keyword_inclusion_reward_fn():
    assert grpo.keyword_inclusion_reward_fn("A RED apple.", ["apple", "red"]) == {
        "reward": 1.0,
        "inclusion": 1.0,
        "fraction": 1.0,
    }
    assert grpo.keyword_inclusion_reward_fn("reduced apple", ["apple", "red"])["reward"] == 0.0
    advantages, raw, _ = grpo.compute_group_normalized_rewards(
        grpo.keyword_inclusion_reward_fn, ["red", "blue"], [["red"], ["red"]], 2, 1e-6, False
    )
    assert raw.tolist() == [1.0, 0.0]
    assert advantages.tolist() == [0.5, -0.5]
