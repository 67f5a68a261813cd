"""The learner on a mesh: what it costs on one GPU, and arithmetic for meshes that nobody measured.

torchrun --nproc-per-node 1 benchmarks/mesh.py step      a step, plain and on a mesh of 1 × 1 × 1
torchrun --nproc-per-node 1 benchmarks/mesh.py offload   the memory that leaves the GPU
python benchmarks/mesh.py arithmetic                     7B and 70B on 8 and 64 GPUs, simulated
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from burnish.learner.learner import LocalLearner
from burnish.learner.mesh.mesh import Mesh
from burnish.learner.program import compile
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import Pack, pack
from burnish.types import (
    Completion,
    Finish,
    Grade,
    Group,
    Prompt,
    SamplingParams,
    Scores,
    Status,
)

SIZES = "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "tied"
SHAPES = {
    "1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "tiny": (2, 64, 4, 2, 128, 512, True),
    "7B": (28, 3584, 28, 4, 18944, 152064, False),
    "70B": (80, 8192, 64, 8, 28672, 128256, False),
}
"""`SIZES` of Qwen2.5-1.5B and 7B, of Llama-3.1-70B, and of a test."""
PEAK, REACHED = 989e12, 0.4
"""bf16 operations per second of an H200 by its data sheet, and the share that is assumed."""
NVLINK, NETWORK = 300e9, 40e9
"""Bytes per second and GPU that collectives are assumed to reach inside a node of 8 and beyond."""
RESPONSES, TOKENS, PACK = 1024, 1024, 16384
"""Of a train batch: responses, tokens of each with its prompt's share, and tokens of a pack."""


def shape(name: str) -> ModelConfig:
    given: dict[str, Any] = dict(zip(SIZES, SHAPES[name], strict=True))
    return ModelConfig(context=4096, **given)


def make_batch(name: str, device: str, responses: int, length: int) -> list[Group]:
    """Random tokens: prompts of 128 tokens with 8 responses each."""
    random = np.random.default_rng(0)
    groups = []
    for index in range(responses // 8):
        prompt = random.integers(0, shape(name).vocab_size, 128).astype(np.int32)
        completions = [_completion(random, name, length, n) for n in range(8)]
        grades = [Grade(float(random.normal()), {}, Status.SCORED) for _ in range(8)]
        one = Prompt(str(index), "", prompt, "bench")
        groups.append(Group(index, one, tuple(completions), tuple(grades)))
    return groups


def _completion(random: np.random.Generator, name: str, length: int, number: int) -> Completion:
    count = int(random.integers(length // 2, length + 1))
    return Completion(
        request_id="0",
        sample_index=number,
        token_ids=random.integers(0, shape(name).vocab_size, count).astype(np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        sampled=np.ones(count, bool),
        params=SamplingParams(temperature=1.0, max_tokens=length),
        finish=Finish.STOP,
        stop=None,
        text="",
    )


def make(name: str, device: str, mesh: Mesh | None) -> LocalLearner:
    train = TrainConfig(
        batch=10**6, precision="bf16", micro_tokens=PACK, learning_rate=1e-6, recompute=True
    )
    with torch.device(device):  # drawn there: a CPU takes a quarter of a minute for 1.5B
        model = Transformer(shape(name))
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.02)
    model = model.learn(recompute=True)
    model = model.cpu() if mesh else model
    return LocalLearner(model, compile(ObjectiveConfig()), train, ranks=mesh)


def steps(learner: LocalLearner, groups: list[Group], device: str, count: int) -> list[float]:
    batch = pack(groups).to(device)
    advantages = learner.program.advantages(batch, Scores())
    (learn,) = learner.program.batches(batch, advantages, Scores(), [Pack.whole(batch)])
    seconds = []
    for _ in range(count):
        wait(device)
        start = time.perf_counter()
        learner.step(learn)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds[2:]  # the first two find their kernels and their memory


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def start() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    return device


def compare(name: str, responses: int, length: int, count: int, gather: str) -> None:
    """Steps of the plain learner and of the mesh in turn, on the same batch."""
    device = start()
    groups = make_batch(name, device, responses, length)
    medians: dict[str, list[float]] = {"plain": [], "mesh": []}
    for _ in range(3):
        for kind in medians:
            mesh = Mesh((1, 1, 1), shape(name), device, gather=gather) if kind == "mesh" else None
            learner = make(name, device, mesh)
            taken = steps(learner, groups, device, count)
            medians[kind].append(statistics.median(taken))
            peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
            print(f"{kind}: {medians[kind][-1]:.4f} s a step, peak {peak:.1f} GB", flush=True)
            del learner, mesh
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    ratio = statistics.median(medians["mesh"]) / statistics.median(medians["plain"])
    tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    told = f"{name}, bf16, {responses} responses of {tokens} tokens, {PACK} tokens a pack, "
    told += f"mesh.gather = {gather!r}"
    print(f"{told}: a mesh of 1 × 1 × 1 takes {ratio:.4f} times as long as the plain learner")
    dist.destroy_process_group()


def offload(name: str, responses: int, length: int) -> None:
    device = start()
    mesh = Mesh((1, 1, 1), shape(name), device, offload=True)
    learner = make(name, device, mesh)
    groups = make_batch(name, device, responses, length)
    steps(learner, groups, device, 3)
    for where in ("cpu", device, "cpu", device):
        before, began = held(device), time.perf_counter()
        mesh.move(learner, where)
        wait(device)
        seconds = time.perf_counter() - began
        print(f"to {where}: {before:.2f} GB → {held(device):.2f} GB in {seconds:.2f} s", flush=True)
    steps(learner, groups, device, 3)
    print("a step after it works")
    dist.destroy_process_group()


def held(device: str) -> float:
    if device != "cuda":
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 1e9


def arithmetic() -> None:
    """A GRPO step with a reference: memory of a rank, bytes over its links, and seconds."""
    print(f"simulated: {RESPONSES} responses × {TOKENS} tokens a step, packs of {PACK} tokens,")
    print(f"{REACHED:.0%} of {PEAK / 1e12:.0f} TFLOP/s, {NVLINK / 1e9:.0f} GB/s in a node of 8,")
    print(f"{NETWORK / 1e9:.0f} GB/s beyond; layers are recomputed, AdamW in fp32\n")
    print("| model | mesh | gather | GB per rank | GB over shard | over replicate |", end="")
    print(" over tensor | compute s | links s | step s |\n" + "| --- " * 10 + "|")
    meshes = {
        "7B": [(1, 8, 1), (1, 4, 2), (8, 8, 1), (1, 64, 1)],
        "70B": [(1, 8, 1), (1, 4, 2), (1, 64, 1), (1, 8, 8), (2, 8, 4)],
    }
    for name, all_sizes in meshes.items():
        for sizes in all_sizes:
            print(row(name, sizes, "step"))
            print(row(name, sizes, "layer"))


def row(name: str, sizes: tuple[int, int, int], gather: str) -> str:
    config, (replicate, shard, tensor) = shape(name), sizes
    with torch.device("meta"):
        model = Transformer(config)
    count = sum(p.numel() for p in model.parameters())
    outer = sum(p.numel() for n, p in model.named_parameters() if "layers." not in n)
    layer = (count - outer) / config.n_layers
    tokens = RESPONSES * TOKENS / (replicate * shard)  # of a rank
    packs = -(-tokens // PACK)
    # Masters, gradients, moments and the reference; gathered weights and gradients, in bf16.
    few = 2 * layer + outer
    kept = count if gather == "step" else few
    memory = (16 + 2) * count / (shard * tensor) + 2 * (kept + few) / tensor
    memory += 2 * PACK * config.d_model * config.n_layers  # a pack's input of each layer
    memory += PACK * (8 * config.d_model + 6 * config.d_ff / tensor)  # one layer, made again
    # Weights in bf16 for the reference's pass, forward and backward, and gradients in fp32.
    weights = 2 * 2 if gather == "step" else packs * 3 * 2
    over_shard = (weights + packs * 4) * count / tensor * (shard - 1) / shard
    over_replicate = packs * 2 * 4 * count / (tensor * shard) * (replicate - 1) / replicate
    sums = (2 + 2 + 2 + 2) * config.n_layers  # reference, forward, again, backward
    over_tensor = sums * 2 * 2 * tokens * config.d_model * (tensor - 1) / tensor
    # Forward for the reference 2, forward 2, again 2, backward 4 operations a parameter and token.
    compute = 10 * count / tensor * tokens / (PEAK * REACHED)
    # Ranks of a node are the tensor ranks first, then shards.
    to_shard = NVLINK if shard * tensor <= 8 else NETWORK
    links = over_tensor / NVLINK + over_shard / to_shard + over_replicate / NETWORK
    hidden = over_shard / to_shard + over_replicate / NETWORK
    step = over_tensor / NVLINK + max(compute, hidden)
    gigabytes = " | ".join(
        f"{x / 1e9:,.0f}" for x in (memory, over_shard, over_replicate, over_tensor)
    )
    seconds = " | ".join(f"{x:.1f}" for x in (compute, links, step))
    return f"| {name} | {' × '.join(map(str, sizes))} | {gather} | {gigabytes} | {seconds} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["step", "offload", "arithmetic"])
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--gather", default="step", choices=["step", "layer"])
    given = parser.parse_args()
    if given.what == "arithmetic":
        return arithmetic()
    if given.what == "offload":
        return offload(given.shape, given.responses, given.length)
    return compare(given.shape, given.responses, given.length, given.steps, given.gather)


if __name__ == "__main__":
    main()
