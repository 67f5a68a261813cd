"""The packed policy equals plain implementations over padded sequences, values and gradients."""

import math

import pytest
import torch
import transformers
from torch import Tensor

from burnish.model import checkpoint, logprobs
from burnish.model.transformer import Transformer
from burnish.rollout.packing import pack
from tests.learner.conftest import CONFIG, hf_gradients, make_groups, make_policy


def padded_logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """[B, T] -> [B, T, V], by the textbook: a dense causal mask, heads repeated, one loop."""
    batch, length = tokens.shape
    heads, kv, width = CONFIG.n_heads, CONFIG.kv_heads, CONFIG.head_width
    angle = torch.outer(
        torch.arange(length).float(),
        CONFIG.rope.theta ** -(torch.arange(0, width, 2).float() / width),
    )
    turn = torch.complex(angle.cos(), angle.sin()).to(torch.complex128)[:, None]  # [T, 1, D/2]
    hidden_past = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weights[name]

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        turned = torch.complex(left, right) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(CONFIG.n_layers):
        w = {n: weights[f"model.layers.{i}.{n}"] for n in LAYER}
        h = norm(x, f"model.layers.{i}.input_layernorm.weight")
        q, k, v = ((h @ w[f"self_attn.{n}_proj.weight"].T) for n in "qkv")
        q = rotated(q.view(batch, length, heads, width))
        k = rotated(k.view(batch, length, kv, width)).repeat_interleave(heads // kv, 2)
        v = v.view(batch, length, kv, width).repeat_interleave(heads // kv, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width)
        attention = scores.masked_fill(hidden_past, -math.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", attention, v).reshape(batch, length, -1)
        x = x + mixed @ w["self_attn.o_proj.weight"].T
        h = norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["model.embed_tokens.weight"].T


LAYER = [f"self_attn.{n}_proj.weight" for n in "qkvo"]
LAYER += [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]


def padded(groups):
    """Every sequence with its own copy of the prompt: tokens [S, T], action [S, T]."""
    rows = [
        ([*g.prompt.token_ids, *c.token_ids], [False] * len(g.prompt.token_ids) + [*c.sampled])
        for g in groups
        for c in g.completions
    ]
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([[*map(int, t), *[0] * (longest - len(t))] for t, _ in rows])
    action = torch.tensor([[*map(bool, a), *[False] * (longest - len(a))] for _, a in rows])
    return tokens, action


def measured(logits, tokens, action, temperature):
    """Log-probabilities and entropies of the actions, in the order of the sequences."""
    logp = (logits[:, :-1] / temperature).log_softmax(-1)
    chosen = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return chosen[action[:, 1:]], entropy[action[:, 1:]]


def test_packed_with_a_shared_prompt_equals_padded_with_repeated_prompts():
    policy, groups = make_policy(), make_groups(temperature=0.75)
    batch = pack(groups)
    chosen, entropy = policy.score(batch)
    assert chosen[~batch.is_action].abs().sum() == 0
    assert entropy[~batch.is_action].abs().sum() == 0
    weights = {n: v.clone().requires_grad_() for n, v in policy.exchange().items()}
    tokens, action = padded(groups)
    want = measured(padded_logits(weights, tokens), tokens, action, 0.75)
    # float64 throughout, but RoPE's angles, which both make in float32.
    torch.testing.assert_close(chosen[batch.is_action], want[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy[batch.is_action], want[1], rtol=0, atol=1e-12)
    upstream = torch.randn(2, len(want[0]), dtype=torch.float64, generator=torch.manual_seed(0))
    (chosen[batch.is_action] @ upstream[0] + entropy[batch.is_action] @ upstream[1]).backward()
    (want[0] @ upstream[0] + want[1] @ upstream[1]).backward()
    for name, gradient in hf_gradients(policy).items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-10, atol=1e-11)


def test_equals_the_log_softmax_of_transformers_logits(tmp_path):
    model = Transformer(CONFIG).init_weights(5)
    checkpoint.save_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    groups = make_groups(temperature=1.3)
    batch = pack(groups)
    chosen, entropy = model.double().score(batch)
    tokens, action = padded(groups)
    with torch.no_grad():
        want = measured(theirs(tokens).logits, tokens, action, 1.3)
    torch.testing.assert_close(chosen[batch.is_action], want[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy[batch.is_action], want[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [7, logprobs.CHUNK])
def test_chunks_change_nothing(chunk, batch, monkeypatch):
    plain, other = make_policy(), make_policy()
    upstream = torch.randn(2, len(batch.tokens), dtype=torch.float64)
    for policy in (plain, other):
        if policy is other:
            monkeypatch.setattr(logprobs, "CHUNK", chunk)
        chosen, entropy = policy.score(batch)
        (chosen @ upstream[0] + entropy @ upstream[1]).backward()
        with torch.no_grad():
            torch.testing.assert_close(policy.score(batch)[0], chosen, rtol=0, atol=1e-13)
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_recomputed_activations_change_no_gradient(batch):
    plain, other = make_policy(), make_policy(recompute=True)
    for policy in (plain, other):
        policy.score(batch)[0].sum().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_recomputation_keeps_no_activations(batch):
    """What the graph saves, counted: without recomputation every layer's insides are in it."""

    def saved(policy):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            policy.score(batch)
        return sum(sizes)

    assert saved(make_policy(recompute=True)) < 0.5 * saved(make_policy())


def test_exchange_names_are_those_the_engine_reads():
    policy, other = make_policy(), make_policy()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    checkpoint.load_hf_state(other, policy.exchange())
    for a, b in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
