"""How fast weights travel from one actor to another, beside a plain copy in memory.

    python benchmarks/transport.py [--mb 100 500] [--rounds 4] [shared store gloo nixl nccl ipc]

Each round sends a state dict of ten tensors from one actor to another, with checksums and by the
classes that runs use. The receiver copies it into tensors that it has already; the tensors change
between two rounds. Printed are the first and the median of the later rounds, the bandwidth, and the
ratio to a copy of as many bytes inside one process. The tensors are on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import ray
import torch

from burnish.actors.cluster import DIRECT_TRANSPORTS, TransportGroup, transport_problem
from burnish.actors.transport import Receiver, Sender, WeightsHandle
from burnish.types import Weights

TENSORS = 10
TRANSPORTS = ("shared", "store", "gloo", "nixl", "nccl", "ipc")


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Peer:
    """Sends weights, or copies weights that it is sent into its own."""

    def make(self, mb: int, how: str, folder: str) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self.sender, self.receiver = Sender(how, folder), Receiver()
        each, where = mb * 250_000 // TENSORS, device()
        self.tensors = {f"w{k}": torch.full((each,), float(k)).to(where) for k in range(TENSORS)}
        self.version = 0

    def change(self) -> None:
        self.version += 1
        for tensor in self.tensors.values():
            tensor.add_(1)

    def weights(self) -> WeightsHandle:
        return self.sender.send(Weights(self.version, 0, self.tensors))

    def read_buffer(self, buffer: str) -> Any:
        return self.sender.data(buffer)

    def take(self, handle: WeightsHandle, data: Any) -> float:
        with self.receiver.opened(handle, data) as weights:
            for name, tensor in weights.tensors.items():
                self.tensors[name].copy_(tensor)
        return float(self.tensors["w1"][-1])


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def copies(mb: int, rounds: int) -> list[float]:
    """Seconds of copies of so many bytes in this process."""
    source = torch.ones(mb * 250_000, device=device())
    target = torch.zeros_like(source)
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        float(target[-1])  # a GPU is waited for
        found.append(time.perf_counter() - began)
    return found


def seconds(how: str, mb: int, rounds: int, folder: str) -> list[float]:
    peers = [Peer.options(num_gpus=int(how == "nccl")).remote() for _ in range(2)]
    ray.get([peer.make.remote(mb, how, folder) for peer in peers])
    group, (sender, receiver) = (
        TransportGroup(how, ["sender", "receiver"] if how in DIRECT_TRANSPORTS else []),
        peers,
    )
    if group.members:
        group.join(peers, 120)
    found = []
    for number in range(rounds):
        ray.get(sender.change.remote())
        began = time.perf_counter()
        handle = ray.get(sender.weights.remote())
        last = ray.get(
            receiver.take.remote(
                handle, group.with_transport(sender.read_buffer).remote(handle.buffer)
            )
        )
        found.append(time.perf_counter() - began)
        assert last == 1 + number + 1, "the weights are old"
    for actor in peers:
        ray.kill(actor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("transports", nargs="*", default=TRANSPORTS)
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--rounds", type=int, default=4)
    given: Any = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # both see the one GPU
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="error")
    with tempfile.TemporaryDirectory(prefix="burnish-", dir="/dev/shm") as folder:
        measure(given, folder)


def measure(given: Any, folder: str) -> None:
    for mb in given.mb:
        plain = statistics.median(copies(mb, given.rounds + 1)[1:])
        print(f"{mb} MB  {'copy in memory':14}  {plain:6.3f} s  {mb / plain / 1000:5.1f} GB/s")
        for how in given.transports:
            gpus = min(1, torch.cuda.device_count() / 2)
            if reason := transport_problem(how, gpus > 0, gpus):
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
