"""The ranks of a learner on a mesh of replicate × shard × tensor, with one process per rank.

Parameters, gradients and moments are split twice: over the tensor dimension
(`burnish.learner.mesh.tensor_parallel`), and each part over the shard dimension by FSDP2's
``fully_shard``, which also handles replicas. The responses of a train batch are divided over
replicate × shard, with about the same number of tokens per rank. Loss weights are normalised over
the whole train batch, so gradients are summed over the ranks and never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from burnish.learner.learner import LocalLearner
from burnish.learner.mesh import tensor_parallel
from burnish.learner.mesh.tensor_parallel import TensorShard
from burnish.learner.optimizer import copy_weights
from burnish.learner.ranks import Named, local
from burnish.model.critic import Critic
from burnish.model.protocol import Exchanging, Module
from burnish.model.shards import Shards
from burnish.model.transformer import ModelConfig, Transformer, hf_views
from burnish.rollout.packing import Pack, first_token, take
from burnish.types import Measured, PackedBatch

Model = TypeVar("Model", bound=Module)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("replicate", "shard", "tensor")


class Mesh:
    """Implements `burnish.learner.ranks.Ranks` for several processes. The process group already
    exists and has the same number of ranks as the mesh."""

    casts = True

    def __init__(
        self,
        sizes: tuple[int, int, int],
        shape: ModelConfig,
        device: str = "cpu",
        *,
        gather: str = "step",
        offload: bool = False,
    ) -> None:
        """``sizes`` are the numbers of ranks along replicate, shard and tensor; ``shape`` is the
        policy's config. ``gather``: "step" keeps gathered weights for a whole step, "layer" frees a
        layer's weights after it has run. ``offload`` moves the learner to main memory between
        steps."""
        self.device, self.shape, self.offload = device, shape, offload
        self._keeps = gather == "step"
        self.mesh = init_device_mesh(device.partition(":")[0], sizes, mesh_dim_names=NAMES)
        self._plane = self.mesh["replicate", "shard"]
        self._data, self._tensor = self._plane._flatten("data").get_group(), self.mesh["tensor"]
        self.replica, self.shard, self.slice = (self.mesh.get_local_rank(name) for name in NAMES)
        self.sizes = sizes

    def place(self, model: Model, precision: str) -> Model:
        """Shard a complete model in place, over the tensor and shard dimensions; return it.
        Forward passes then gather the weights that they need, in ``precision``."""
        assert isinstance(model, nn.Module)
        body = model.body if isinstance(model, Critic) else model
        if isinstance(body, Transformer):
            tensor_parallel.parallelize(body, self.sizes[2], self.slice, self._tensor.get_group())
        low = PRECISIONS.get(precision)
        policy = MixedPrecisionPolicy(
            low, torch.float32 if low else None, cast_forward_inputs=False
        )
        parts = [*body.layers, model] if isinstance(body, Transformer) else [model]
        for part in parts:
            fully_shard(part, mesh=self._plane, mp_policy=policy, reshard_after_forward=True)
            sharded = cast(FSDPModule, part)
            if self.sizes[0] * self.sizes[1] > 1:  # otherwise torch makes a copy to divide by 1
                sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo can't scale sums
        # Each method gathers the weights outside of the layers first. No method calls another.
        methods = ["read", "score", "hidden", "probe"]
        if isinstance(model, Critic):
            methods = ["values"] if model.body is None else ["score"]
        for method in methods:
            register_fsdp_forward_method(model, method)
        return model

    @contextmanager
    def gathered(self, *models: Module | None) -> Iterator[None]:
        modules = [part for model in models if model is not None for part in model.modules()]
        parts = [part for part in modules if self._keeps and isinstance(part, FSDPModule)]
        _keep(parts, True)
        try:
            yield
        finally:
            _keep(parts, False)
            for part in parts:
                part.reshard()

    def frozen(self, policy: Model, precision: str) -> Model:
        assert isinstance(policy, Transformer), "a mesh trains transformers"
        dtype = PRECISIONS.get(precision, next(policy.parameters()).dtype)
        with torch.device("meta"):
            copy = Transformer(policy.config).to(dtype)
        self.place(copy, "fp32").to_empty(device=self.device)
        copy_weights(policy, copy)
        return cast(Model, copy.requires_grad_(False))

    def divide(self, batch: PackedBatch, split: Callable[[PackedBatch], list[Pack]]) -> list[Pack]:
        """Return the samples of a batch that this rank computes, cut into packs with ``split``.

        Each rank gets consecutive samples, with about the same number of tokens per rank. A rank
        with fewer packs than another gets additional packs without actions, because all ranks must
        join every all-reduce.
        """
        share = (responsible(batch, self.sizes[0] * self.sizes[1]) == self._data.rank()).nonzero()
        packs = []
        if len(share):
            own = take(batch, share.squeeze(1))
            packs = [Pack(part.batch, own.slots[part.slots]) for part in split(own.batch)]
        most = torch.tensor(len(packs), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self._data)
        return packs + [first_token(batch)] * (int(most) - len(packs))

    def join(self, stream: Tensor) -> Tensor:
        dist.all_reduce(stream, group=self._data)
        return stream

    def norm(self, gradients: Iterable[Named]) -> float:
        """Return the global gradient norm. A gradient held by several ranks counts once.

        The gradients of `tensor_parallel.PARTIAL` modules are first summed over the tensor ranks,
        in place, so call it exactly once before each optimizer step.
        """
        counted = [torch.zeros(1, device=self.device)]  # there may be no other on this rank
        for name, gradient in gradients:
            own = local(gradient)
            if tensor_parallel.module_of(name) in tensor_parallel.PARTIAL:
                dist.all_reduce(own, group=self._tensor.get_group())
            if self._is_mine(name):
                counted.append(own)
        whole = torch.stack(torch._foreach_norm(counted)).double().square().sum()
        dist.all_reduce(whole)
        return float(whole.sqrt())

    def exchange(self, policy: Exchanging, precision: str) -> Gathered:
        return Gathered(self.shape, partial(self.gather, policy, precision))

    def gather(self, policy: Module, precision: str, name: str) -> Tensor:
        """Gather the policy's parameter ``name`` from the ranks, rounded to ``precision``; return
        the complete tensor on every rank. All ranks must call it."""
        parameter = policy.get_parameter(name)
        low = PRECISIONS.get(precision, parameter.dtype)
        part, whole = self._slice(name), cast(DTensor, parameter.detach().to(low)).full_tensor()
        return whole if part is None else part.whole(whole, self._tensor.get_group())

    def fill(self, views: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """Overwrite ``views``, this rank's parts of a learner's state, with values from the
        complete tensors ``whole``. If these can be read in part (`burnish.model.shards.Shards`),
        only this rank's parts are read."""
        for name, view in views.items():
            if not isinstance(view, DTensor):
                view.copy_(whole[name])
                continue
            for shard in self._shards(name, view):
                shard.values.copy_(_read_part(whole, name, shard))

    def shards(self, views: Mapping[str, Tensor]) -> dict[str, list[TensorShard]]:
        """Return the shards of a learner's state that this rank has to save, by tensor name. Every
        element of the state is in exactly one shard of one rank."""
        found: dict[str, list[TensorShard]] = {}
        for name, view in views.items():
            if isinstance(view, DTensor):
                own = self._shards(name, view) if self._is_mine(name) else []
            else:
                whole = TensorShard([*view.shape], [0] * view.ndim, view)
                own = [] if dist.get_rank() else [whole]
            if own:
                found[name] = own
        return found

    def _shards(self, name: str, view: DTensor) -> list[TensorShard]:
        """Return this rank's part of a tensor as shards with their places in the complete tensor.
        Their values are views. Several shards are needed if the part is not contiguous there."""
        own, part, start = local(view), self._slice(name), self._start(view)
        if part is None:
            found = [TensorShard([*view.shape], [start, *[0] * (view.ndim - 1)], own)]
        else:
            found = part.shards(own, start, [*view.shape])
        return [shard for shard in found if shard.values.numel()]

    def move(self, learner: LocalLearner[Measured], device: str) -> None:
        """Move all models, moments and averages of a learner to ``device``: this rank's GPU, or
        "cpu" for main memory."""
        frozen = (learner.reference, learner.initial, learner.previous, learner.teacher)
        models = [model for model in frozen if model is not None]
        models += [optimizer.policy for optimizer in learner.optimizers.values()]
        for model in models:
            assert isinstance(model, nn.Module)
            model.to(device)
        for optimizer in learner.optimizers.values():
            for moments in optimizer.adamw.state.values():
                moments |= {name: tensor.to(device) for name, tensor in moments.items()}
        if learner.average is not None:
            learner.average.to(device)
        if device == "cpu":
            torch.cuda.empty_cache()  # so that an engine in another process can use the memory

    def _is_mine(self, name: str) -> bool:
        """Return whether this rank is the first of the ranks that hold the same part of a tensor,
        and therefore counts or saves it."""
        return not self.replica and (self._slice(name) is not None or not self.slice)

    def _slice(self, name: str) -> tensor_parallel.Slice | None:
        return tensor_parallel.slice_of(self.shape, name, self.sizes[2], self.slice)

    def _start(self, view: DTensor) -> int:
        """Return the index of the first row of this rank's FSDP shard within its tensor-parallel
        slice."""
        of = compute_local_shape_and_global_offset
        return int(of(view.shape, view.device_mesh, view.placements)[1][0])


def _read_part(whole: Mapping[str, Tensor], name: str, shard: TensorShard) -> Tensor:
    """Return the values from ``whole`` at the place of ``shard``. From a sharded checkpoint, only
    these values are read."""
    size = shard.values.shape
    if isinstance(whole, Shards):
        return whole.part(name, shard.offset, size)
    return whole[name][tuple(slice(a, a + n) for a, n in zip(shard.offset, size, strict=True))]


def _keep(parts: Iterable[FSDPModule], keeps: bool) -> None:
    """Set whether parts of a model keep their gathered weights after they have run."""
    for part in parts:
        part.set_reshard_after_forward(not keeps, recurse=False)
        part.set_reshard_after_backward(not keeps, recurse=False)


class Gathered(Mapping[str, Tensor]):
    """Mapping from Hugging Face's names to complete weights. A weight is gathered from the ranks
    when it is read, and only the last parameter is kept, so that no rank ever holds all of them."""

    def __init__(self, shape: ModelConfig, gather: Callable[[str], Tensor]) -> None:
        """``gather`` takes the name of a parameter and returns the complete parameter."""
        self._shape, self._gather = shape, gather
        with torch.device("meta"):
            parameters = Transformer(shape).named_parameters()
        self._sources = {view: name for name, p in parameters for view in hf_views(shape, name, p)}
        """The name of the parameter that each view belongs to."""
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        if self._last[0] != source:
            self._last = ("", {})  # free the last parameter before the next one is gathered
            self._last = source, hf_views(self._shape, source, self._gather(source))
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def responsible(batch: PackedBatch, count: int) -> Tensor:
    """Assign each sample of a batch to one of ``count`` ranks, [S]: consecutive samples, with about
    the same number of tokens per rank. A sample belongs to the rank in whose share of the batch's
    tokens its middle lies. The tokens of a prompt count with the first sample that follows it."""
    tokens = torch.zeros_like(batch.group_ids)
    tokens.index_add_(0, batch.segment_samples, batch.segment_offsets.diff())
    ends = tokens.cumsum(0)
    return (2 * ends - tokens) * count // (2 * ends[-1])
