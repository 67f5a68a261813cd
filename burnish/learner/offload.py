"""AdamW's moments in main memory, copied to a GPU in slices while their weights are updated."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from burnish.errors import RunError

SLICE = 2**23
"""Most numbers of a tensor that are copied at a time. A copy of 34 MB takes far longer than its
start."""
ROOMS = 4
"""Slices that are on the GPU at a time: of both moments 268 MB. With two, the copies of a large
parameter would wait for those of small ones before and after it."""


def slices(count: int) -> Iterator[slice]:
    """Yield slices that divide a tensor of ``count`` numbers into parts of at most `SLICE`, of
    almost equal size. They start at multiples of 64, so that vector instructions compute the same
    as over the whole tensor."""
    parts = max(1, math.ceil(count / SLICE))
    size = 64 * max(1, math.ceil(count / (64 * parts)))
    return (slice(i, min(i + size, count)) for i in range(0, count, size))


def staged(held: Sequence[tuple[Tensor, ...]], device: torch.device) -> Iterator[Sequence[Tensor]]:
    """Yield, for each tuple of ``held``, copies on ``device``. The caller changes the copies on the
    current stream before it takes the next ones; then they are copied back.

    ``held`` has tuples of float32 tensors in main memory, one-dimensional and of one length within
    a tuple. On a GPU, copies to it and from it run at the same time, on one stream per direction,
    and `ROOMS` tuples are there at a time. All are back when the iteration has ended. On a CPU, the
    tensors themselves are yielded.
    """
    if device.type != "cuda" or not held:
        yield from held
        return
    longest = max(len(one[0]) for one in held)
    rooms = torch.empty(ROOMS, len(held[0]), longest, device=device)
    main = torch.cuda.current_stream(device)
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    inward.wait_stream(main)  # the memory of the rooms may still be in use there
    arrived, returned = list[torch.cuda.Event](), list[torch.cuda.Event]()

    def place(number: int) -> list[Tensor]:
        return [room[: len(held[number][0])] for room in rooms[number % ROOMS]]

    def fetch(number: int) -> None:
        if number >= ROOMS:
            inward.wait_event(returned[number - ROOMS])
        with torch.cuda.stream(inward):
            for copy, tensor in zip(place(number), held[number], strict=True):
                copy.copy_(tensor, non_blocking=True)
        arrived.append(inward.record_event())

    fetch(0)
    for number, tensors in enumerate(held):
        if number + 1 < len(held):
            fetch(number + 1)  # before the update, so that the CPU does not delay it
        main.wait_event(arrived[number])
        yield place(number)
        outward.wait_stream(main)
        with torch.cuda.stream(outward):
            for copy, tensor in zip(place(number), tensors, strict=True):
                tensor.copy_(copy, non_blocking=True)
        returned.append(outward.record_event())
    torch.cuda.synchronize(device)  # others may read the tensors now


def pinned_zeros(like: Tensor) -> Tensor:
    """Return zeros of the shape of a parameter in main memory, pinned if the parameter is on a GPU,
    which then reads and writes them at full speed.

    torch's own pinned memory is not used: it rounds sizes up to powers of two. Raise a RunError if
    the system does not allow to pin so much."""
    zeros = torch.zeros(like.shape, dtype=like.dtype)
    if like.is_cuda and zeros.numel():
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        place, size = zeros.data_ptr(), zeros.numel() * zeros.element_size()
        if error := int(driver.cudaHostRegister(place, size, 0)):
            raise RunError(
                f"the system does not pin {size:,} bytes of main memory for AdamW's moments (CUDA "
                f"error {error}); raise its limit of locked memory (ulimit -l), or remove "
                "train.offload"
            )
        weakref.finalize(zeros, driver.cudaHostUnregister, place).atexit = False
    return zeros
