"""A learner on a mesh of replicate × shard × tensor ranks, one process each.

Parameters, gradients and moments are cut twice: over tensor (``slices``), and what is left over
shard, by FSDP2's ``fully_shard``, whose own replicas are the first dimension. Train batches are
divided over replicate × shard by tokens. Denominators are weights over the whole train batch, so
gradients are summed and never divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

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

from burnish.learner import slices
from burnish.learner.optim import copy_weights
from burnish.learner.ranks import Named, local
from burnish.learner.slices import Piece
from burnish.model.transformer import ModelConfig, Transformer, hf_views
from burnish.model.value import Critic
from burnish.rollout.packing import Pack, first_token, take
from burnish.types import PackedBatch

Model = TypeVar("Model", bound=nn.Module)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("replicate", "shard", "tensor")


class Mesh:
    """The ranks of a learner. The process group exists already, and has as many ranks."""

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
        """``sizes`` are the ranks along replicate, shard and tensor; ``shape`` is the policy's.
        ``gather``: weights stay gathered for a "step", or a "layer" lets go of its own when it has
        run. ``offload``: the learner is moved to main memory while nobody learns."""
        self.device, self.shape, self.offload = device, shape, offload
        self._keeps = gather == "step"
        self.mesh = init_device_mesh(device.partition(":")[0], sizes, mesh_dim_names=NAMES)
        self._plane = self.mesh["replicate", "shard"]
        self._data, self._tensor = self._plane._flatten("data").get_group(), self.mesh["tensor"]
        self.replica, self.shard, self.slice = (self.mesh.get_local_rank(name) for name in NAMES)
        self.sizes = sizes

    def place(self, model: Model, precision: str) -> Model:
        """Cuts a whole model in place."""
        body = model.body if isinstance(model, Critic) else model
        if isinstance(body, Transformer):
            slices.cut(body, self.sizes[2], self.slice, self._tensor.get_group())
        low = PRECISIONS.get(precision)
        policy = MixedPrecisionPolicy(
            low, torch.float32 if low else None, cast_forward_inputs=False
        )
        parts = [*body.layers, model] if isinstance(body, Transformer) else [model]
        for part in parts:
            fully_shard(part, mesh=self._plane, mp_policy=policy, reshard_after_forward=True)
            cut = cast(FSDPModule, part)
            if self.sizes[0] * self.sizes[1] > 1:  # else torch divides by 1, which takes a copy
                cut.set_gradient_divide_factor(1.0)
            cut.set_force_sum_reduction_for_comms(True)  # gloo has no multiplied sums
        # Each gathers the weights outside of the layers first. None of them calls another.
        methods = ["read", "score", "hidden", "probe"]
        if isinstance(model, Critic):
            methods = ["values"] if model.body is None else ["score"]
        for method in methods:
            register_fsdp_forward_method(model, method)
        return model

    @contextmanager
    def gathered(self, *models: nn.Module | None) -> Iterator[None]:
        modules = [part for model in models if model is not None for part in model.modules()]
        parts = [part for part in modules if self._keeps and isinstance(part, FSDPModule)]
        _keep(parts, True)
        try:
            yield
        finally:
            _keep(parts, False)
            for part in parts:
                part.reshard()

    def frozen(self, policy: Transformer, precision: str) -> Transformer:
        dtype = PRECISIONS.get(precision, next(policy.parameters()).dtype)
        with torch.device("meta"):
            copy = Transformer(policy.config).to(dtype)
        self.place(copy, "fp32").to_empty(device=self.device)
        copy_weights(policy, copy)
        return copy.requires_grad_(False)

    def divide(self, batch: PackedBatch, cut: Callable[[PackedBatch], list[Pack]]) -> list[Pack]:
        """Responses go to the ranks in order, about as many tokens to each. A rank without packs
        enough has empty ones, because every rank takes part in every sum."""
        share = (responsible(batch, self.sizes[0] * self.sizes[1]) == self._data.rank()).nonzero()
        packs = []
        if len(share):
            own = take(batch, share.squeeze(1))
            packs = [Pack(part.batch, own.slots[part.slots]) for part in cut(own.batch)]
        most = torch.tensor(len(packs), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self._data)
        return packs + [first_token(batch)] * (int(most) - len(packs))

    def join(self, stream: Tensor) -> Tensor:
        dist.all_reduce(stream, group=self._data)
        return stream

    def norm(self, gradients: Iterable[Named]) -> float:
        """Of each gradient that several ranks have, one rank's counts."""
        counted = [torch.zeros(1, device=self.device)]  # there may be no other
        for name, gradient in gradients:
            own = local(gradient)
            if slices.module_of(name) in slices.PARTIAL:
                dist.all_reduce(own, group=self._tensor.get_group())
            if self._is_mine(name):
                counted.append(own)
        whole = torch.stack(torch._foreach_norm(counted)).double().square().sum()
        dist.all_reduce(whole)
        return float(whole.sqrt())

    def exchange(self, policy: Transformer, precision: str) -> Gathered:
        return Gathered(self.shape, partial(self.gather, policy, precision))

    def gather(self, policy: Any, precision: str, name: str) -> Tensor:
        """A whole parameter, on every rank."""
        parameter = policy.get_parameter(name)
        low = PRECISIONS.get(precision, parameter.dtype)
        part, whole = self._slice(name), cast(DTensor, parameter.detach().to(low)).full_tensor()
        return whole if part is None else part.whole(whole, self._tensor.get_group())

    def fill(self, views: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """A mapping that can read a part of a tensor is asked for this rank's parts alone."""
        for name, view in views.items():
            if not isinstance(view, DTensor):
                view.copy_(whole[name])
                continue
            for piece in self._boxes(name, view):
                piece.box.copy_(_part(whole, name, piece))

    def pieces(self, views: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
        """This rank's boxes of a learner's state; every number is in one box of one rank."""
        found: dict[str, list[Piece]] = {}
        for name, view in views.items():
            if isinstance(view, DTensor):
                boxes = self._boxes(name, view) if self._is_mine(name) else []
            else:
                boxes = [] if dist.get_rank() else [Piece([*view.shape], [0] * view.ndim, view)]
            if boxes:
                found[name] = boxes
        return found

    def _boxes(self, name: str, view: DTensor) -> list[Piece]:
        """This rank's part of a tensor, as boxes of the whole that are views of the part."""
        own, part, start = local(view), self._slice(name), self._start(view)
        if part is None:
            boxes = [Piece([*view.shape], [start, *[0] * (view.ndim - 1)], own)]
        else:
            boxes = part.boxes(own, start, [*view.shape])
        return [piece for piece in boxes if piece.box.numel()]

    def move(self, learner: Any, device: str) -> None:
        """Moves all that a learner holds to a device: its GPU, or the main memory."""
        frozen = (learner.reference, learner.initial, learner.previous, learner.teacher)
        for model in frozen:
            if model is not None:
                model.to(device)
        for optimizer in learner.optimizers.values():
            optimizer.policy.to(device)
            for moments in optimizer.adamw.state.values():
                moments |= {name: tensor.to(device) for name, tensor in moments.items()}
        if device == "cpu":
            torch.cuda.empty_cache()  # an engine in another process may take it

    def _is_mine(self, name: str) -> bool:
        """Whether this rank's part of a tensor is no copy of another rank's."""
        return not self.replica and (self._slice(name) is not None or not self.slice)

    def _slice(self, name: str) -> slices.Slice | None:
        return slices.slice_of(self.shape, name, self.sizes[2], self.slice)

    def _start(self, view: DTensor) -> int:
        """The first row of a rank's part, in its slice of the tensor."""
        of = compute_local_shape_and_global_offset
        return int(of(view.shape, view.device_mesh, view.placements)[1][0])


def _part(whole: Mapping[str, Tensor], name: str, piece: Piece) -> Tensor:
    """The numbers of a box of a tensor; of a checkpoint's tensor no more than those is read."""
    size, read = piece.box.shape, getattr(whole, "part", None)
    if read is not None:
        found: Tensor = read(name, piece.at, size)
        return found
    return whole[name][tuple(slice(a, a + n) for a, n in zip(piece.at, size, strict=True))]


def _keep(parts: Iterable[FSDPModule], keeps: bool) -> None:
    """Whether parts of a model keep their weights gathered once they have run."""
    for part in parts:
        part.set_reshard_after_forward(not keeps, recurse=False)
        part.set_reshard_after_backward(not keeps, recurse=False)


class Gathered(Mapping[str, Tensor]):
    """Whole weights under Hugging Face's names, each gathered when it is asked for. Only the last
    parameter is kept, so that no rank ever has all of them."""

    def __init__(self, shape: ModelConfig, gather: Callable[[str], Tensor]) -> None:
        """``gather`` is given the name of a parameter."""
        self._shape, self._gather = shape, gather
        with torch.device("meta"):
            parameters = Transformer(shape).named_parameters()
        self._sources = {view: name for name, p in parameters for view in hf_views(shape, name, p)}
        """The parameter that has each view."""
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        if self._last[0] != source:
            self._last = ("", {})  # before the next one is there
            self._last = source, hf_views(self._shape, source, self._gather(source))
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def responsible(batch: PackedBatch, count: int) -> Tensor:
    """[S]: the rank of each response, by the tokens up to its middle. A group's first response has
    the prompt's tokens, too."""
    lengths = batch.segment_offsets.diff()
    responses = lengths[~batch.segment_is_prompt]
    is_first = batch.group_ids.diff(prepend=batch.group_ids[:1] - 1) > 0
    tokens = responses + is_first * lengths[batch.segment_is_prompt][batch.group_ids]
    ends = tokens.cumsum(0)
    return (2 * ends - tokens) * count // (2 * ends[-1])
