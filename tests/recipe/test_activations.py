"""The estimate of activations against the memory that a gradient step allocates.

A GPU's step runs on the meta device, which has shapes but no data, and each storage is counted from
its creation to its end. The Triton kernels are replaced by functions that only allocate what the
kernels allocate.
"""

import dataclasses
import sys
import weakref
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import burnish.model
from burnish.launch.memory import widths_of
from burnish.learner.optimizer import _fold
from burnish.model import activations, chained, gather, logprobs, transformer
from burnish.model.attention import FlashPackedAttention
from burnish.model.logprobs import GPU_CHUNK, token_logprobs
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.activations import (
    LOGIT_ROWS,
    WORKSPACES,
    PackSize,
    activation_bytes,
    largest_pack,
)
from burnish.recipe.recipe import RolloutConfig, TrainConfig

QWEN2 = ModelConfig(
    vocab_size=50_000,
    n_layers=6,
    d_model=768,
    n_heads=12,
    n_kv_heads=2,
    d_ff=4096,
    context=40_000,
    family="qwen2",
)
QWEN3 = dataclasses.replace(QWEN2, family="qwen3", head_dim=128, tied=False)
LARGE = ModelConfig(
    vocab_size=152_064,
    n_layers=28,
    d_model=3584,
    n_heads=28,
    n_kv_heads=4,
    d_ff=18_944,
    context=40_000,
    family="qwen2",
    tied=False,
)


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that exist, and the most that ever existed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # whether a temperature differs from 1
        if func is torch.ops.aten.is_set_to.default:  # missing for the meta device
            one, other = args
            same_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
            return same_storage and (one.shape, one.stride()) == (other.shape, other.stride())
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _add(self, storage):
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key, size):
        self._known.discard(key)
        self.now -= size


class _Norm(torch.autograd.Function):
    """RMSNorm in one kernel, which saves its input and a scale per row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, up):
        return torch.empty_like(up), torch.empty_like(ctx.saved_tensors[1])


@pytest.fixture
def as_on_gpu(monkeypatch):
    elementwise, softmax = (
        ModuleType(f"burnish.model.{kind}_kernels") for kind in ("elementwise", "softmax")
    )
    elementwise.swiglu_forward = lambda both: both.new_empty(len(both), both.shape[1] // 2)
    elementwise.swiglu_backward = lambda up, both: torch.empty_like(both)
    elementwise.rotate_heads = elementwise.rotate_heads_back = lambda *given: None
    elementwise.add_rows = lambda x, order, starts: x.new_empty(len(starts) - 1, x.shape[1])
    softmax.moments = softmax.gradient = lambda *given, **settings: None
    for module in (elementwise, softmax):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(burnish.model, name, module, raising=False)
    for module in (activations, chained, gather, logprobs, transformer):
        monkeypatch.setattr(module, "fuses", lambda x: True)
    monkeypatch.setattr(activations.RMSNorm, "forward", lambda self, x: _Norm.apply(x, self.weight))


def attention_of(prompt, response, samples, prompts):
    lengths = [prompt, *[response] * samples] * prompts
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    is_prompt = torch.tensor([True, *[False] * samples] * prompts)
    attend, count = FlashPackedAttention(offsets, is_prompt), int(offsets[-1])
    index = attend._context.index.to("meta")
    attend._context.index = index
    attend._context._inverse = index, torch.empty(count + 1, dtype=torch.int64, device="meta")
    given = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in attend._arguments]
    attend._arguments = tuple(given)
    return attend, count


def allocated(config, shape, *, packs, last=None, has_masters=True, **settings):
    """Peak beside bf16 weights and all fp32 gradients, and the bytes of these gradients. Without
    masters, there are no fp32 gradients."""
    attend, count = attention_of(*shape)
    _, response, samples, prompts = shape
    with Storages() as storages, torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16).learn(last, **settings)
        learned = 0
        for p in model.parameters():
            if p.requires_grad and has_masters:
                master = torch.empty(p.shape)
                learned += master.numel()
                p.register_post_accumulate_grad_hook(partial(_fold, master))
                p.master = master
        before = storages.now
        integers = partial(torch.empty, dtype=torch.int64)
        for _ in range(packs):
            batch = SimpleNamespace(tokens=integers(count), positions=integers(count))
            x = model.lower(batch, attend)
            x = model._run(model.layers[model.lower_layers :], x, batch.positions, attend)
            hidden = model.norm(x)
            rows = integers(prompts * samples * response)
            given = batch.tokens, integers(count), rows, torch.empty(count)
            measured = token_logprobs(model, hidden, *given)
            loss = measured.logprobs.sum()
            del x, hidden, measured
            loss.backward()
        return storages.peak - before - 4 * learned, 4 * learned


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packs", [1, 2])
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (QWEN2, (1, 1023, 1, 16)),
        (QWEN2, (1000, 32, 8, 8)),
        (QWEN3, (100, 400, 4, 4)),
        (LARGE, (1, 1023, 1, 16)),
        (LARGE, (512, 32_768, 1, 1)),
    ],
)
def test_the_estimate_is_the_memory_that_a_step_allocates(
    as_on_gpu, config, shape, packs, recompute
):
    """Prompt, response, responses per prompt, prompts; the total is within 1%."""
    found, gradients = allocated(config, shape, packs=packs, recompute=recompute)
    prompt, response, samples, prompts = shape
    tokens = prompts * (prompt + samples * response)
    actions, contexts = prompts * samples * response, tokens + prompts * samples * prompt
    pack = PackSize(tokens, actions, contexts, is_whole=packs == 1)
    train = TrainConfig(recompute=recompute)
    told = activation_bytes(widths_of(config), pack, config.n_layers, gradients, train, 2)
    fixed = 2.5 * gradients  # weights in bf16, masters and gradients
    assert told - WORKSPACES + fixed == pytest.approx(found + fixed, rel=0.01)


@pytest.mark.parametrize("recompute", [False, True])
def test_only_the_upper_layers_save_tensors(as_on_gpu, recompute):
    found, gradients = allocated(QWEN2, (1, 1023, 1, 16), packs=1, last=2, recompute=recompute)
    train = TrainConfig(learn={"name": "layers", "last": 2}, recompute=recompute)
    pack = PackSize(16_384, 16_368, 16_400)
    told = activation_bytes(widths_of(QWEN2), pack, 2, gradients, train, 2)
    assert told - WORKSPACES + gradients == pytest.approx(found + gradients, rel=0.05)


def test_an_fp32_head_takes_more(as_on_gpu):
    config = dataclasses.replace(QWEN2, fp32_head=True)
    found, gradients = allocated(config, (1, 1023, 1, 16), packs=2)
    pack = PackSize(16_384, 16_368, 16_400, is_whole=False)
    told = activation_bytes(widths_of(config), pack, 6, gradients, TrainConfig(), 2)
    assert told - WORKSPACES == pytest.approx(found, rel=0.05)


def test_the_largest_pack_of_a_step():
    """12 responses of 100 tokens to 3 prompts of 50, in all 1,350 tokens."""
    rollout = RolloutConfig(batch=24, group_size=4, max_tokens=100)
    assert largest_pack(TrainConfig(batch=12), rollout, 50) == (1350, 1200, 1950, True)
    half = largest_pack(TrainConfig(batch=12, micro_tokens=675), rollout, 50)
    assert half == (675, 600, 975, False)
    whole = largest_pack(TrainConfig(batch=12, micro_tokens=2000), rollout, 50)
    assert whole == (1350, 1200, 1950, True)
    few = largest_pack(TrainConfig(batch=12, micro_sequences=5), rollout, 50)
    assert few == (2 * 50 + 500, 500, 600 + 250, False)


def test_a_gpu_holds_as_many_rows_of_logits_as_the_estimate_counts():
    assert LOGIT_ROWS == GPU_CHUNK


def test_the_workspaces_are_the_rest_of_measured_peaks(as_on_gpu, monkeypatch):
    """1.5 billion weights on an H200, in bf16 without masters: 38.0 GiB, and 8.2 GiB with
    recomputation. That version stored all inputs of linear layers, and its head held one more
    gradient of its weight in bf16."""
    monkeypatch.setattr(chained, "fuses", lambda x: False)
    config = dataclasses.replace(
        QWEN2, vocab_size=151_936, n_layers=28, d_model=1536, n_heads=12, d_ff=8960
    )
    with torch.device("meta"):
        weights = 2 * sum(p.numel() for p in Transformer(config).parameters())
    for recompute, gib, more in ((False, 38.0, 2 * 151_936 * 1536), (True, 8.2, 0)):
        found, _ = allocated(
            config, (1, 1023, 1, 16), packs=1, has_masters=False, recompute=recompute
        )
        assert weights + found + more + WORKSPACES == pytest.approx(gib * 2**30, rel=0.01)
