"""How fast weights travel from one actor to another, beside a plain copy in memory.

    python benchmarks/transport.py [--mb 100 500] [--rounds 4] [store shared gloo nixl]

Each round sends a state dict of ten tensors from one actor to another, which copies it into tensors
that it has already; the tensors change between two rounds. Printed are the first and the median of
the later rounds, the bandwidth, and the ratio to a copy of as many bytes inside one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from typing import Any

import ray
import torch

from burnish.actors.transport import Parcel, Receiver, Sender
from burnish.types import Weights

TENSORS = 10
OURS = ("store", "shared")
RAYS = ("gloo", "nixl")


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Peer:
    """Sends weights, or copies weights that it is sent into its own."""

    def make(self, mb: int, how: str, folder: str) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self.sender, self.receiver = Sender(how, folder), Receiver()
        each = mb * 250_000 // TENSORS
        self.tensors = {f"w{k}": torch.full((each,), float(k)) for k in range(TENSORS)}
        self.version = 0

    def change(self) -> None:
        self.version += 1
        for tensor in self.tensors.values():
            tensor.add_(1)

    def parcel(self) -> Parcel:
        return self.sender.send(Weights(self.version, 0, self.tensors))

    @ray.method(tensor_transport="gloo")
    def gloo(self) -> dict[str, torch.Tensor]:
        return self.tensors

    @ray.method(tensor_transport="nixl")
    def nixl(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def take_parcel(self, parcel: Parcel) -> float:
        with self.receiver.opened(parcel) as weights:
            return self.take(weights.tensors)

    def take(self, tensors: dict[str, torch.Tensor]) -> float:
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
        return float(self.tensors["w1"][-1])


def copies(mb: int, rounds: int) -> list[float]:
    """Seconds of copies of so many bytes in this process."""
    source, target = torch.ones(mb * 250_000), torch.zeros(mb * 250_000)
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return found


def seconds(how: str, mb: int, rounds: int, folder: str) -> list[float]:
    sender, receiver = Peer.remote(), Peer.remote()
    ray.get([peer.make.remote(mb, how, folder) for peer in (sender, receiver)])
    if how == "gloo":
        from ray.experimental.collective import create_collective_group

        create_collective_group([sender, receiver], backend="gloo")
    found = []
    for number in range(rounds):
        ray.get(sender.change.remote())
        began = time.perf_counter()
        if how in OURS:
            last = ray.get(receiver.take_parcel.remote(sender.parcel.remote()))
        else:
            last = ray.get(receiver.take.remote(getattr(sender, how).remote()))
        found.append(time.perf_counter() - began)
        assert last == 1 + number + 1, "the weights are old"
    for actor in (sender, receiver):
        ray.kill(actor)
    return found


def missing(how: str) -> str | None:
    """Why a transport can't run on this machine; None if it can."""
    if how == "nixl" and importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("transports", nargs="*", default=[*OURS, *RAYS])
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--rounds", type=int, default=4)
    given: Any = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory(prefix="burnish-", dir="/dev/shm") as folder:
        measure(given, folder)


def measure(given: Any, folder: str) -> None:
    for mb in given.mb:
        plain = statistics.median(copies(mb, given.rounds + 1)[1:])
        print(f"{mb} MB  {'copy in memory':14}  {plain:6.3f} s  {mb / plain / 1000:5.1f} GB/s")
        for how in given.transports:
            if reason := missing(how):
                print(f"{mb} MB  {how:14}  skipped: {reason}")
                continue
            try:
                first, *later = seconds(how, mb, given.rounds, folder)
            except Exception as error:
                told = str(error).strip().splitlines()[-1][:120]
                print(f"{mb} MB  {how:14}  does not run here: {told}")
                continue
            usual = statistics.median(later)
            print(
                f"{mb} MB  {how:14}  {usual:6.3f} s  {mb / usual / 1000:5.1f} GB/s  "
                f"{usual / plain:4.1f} copies (first {first:.3f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
