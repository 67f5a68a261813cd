"""Peak memory of one gradient step of the learner, by the number of tokens in its pack.

    python benchmarks/memory.py                       8,192, 16,384 and 32,768 tokens, in fp32
    python benchmarks/memory.py --device cuda         the same on a GPU
    python benchmarks/memory.py --tokens 2048 4096    other sizes

A model of 30 narrow layers learns one response after a prompt of 512 tokens. Each size runs in a
process of its own. On a CPU the peak of resident memory counts beyond the memory that the learner
has after a step on a few tokens; on a GPU it is the most memory that PyTorch had allocated beyond
that. To measure another version of burnish, put its directory into PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

TOKENS = [8192, 16384, 32768]
PROMPT, FEW, VOCABULARY = 512, 1024, 256
SHAPE = {"n_layers": 30, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "d_ff": 64}


def measure(tokens: int, device: str, precision: str, threads: int) -> dict[str, float]:
    """Bytes and seconds of a step, in this process."""
    from burnish.machine import hardware

    hardware.set_up_torch(threads)
    import torch

    from burnish.learner.learner import LocalLearner
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

    def batch_of(count: int) -> Group:
        random = np.random.default_rng(0)
        prompt, response = (
            random.integers(0, VOCABULARY, n).astype(np.int32) for n in (PROMPT, count - PROMPT)
        )
        made = Completion(
            request_id="0",
            sample_index=0,
            token_ids=response,
            logprobs=np.full(len(response), -np.log(VOCABULARY), np.float32),
            versions=np.zeros(len(response), np.int32),
            sampled=np.ones(len(response), bool),
            params=SamplingParams(temperature=1.0, max_tokens=count),
            finish=Finish.STOP,
            stop=None,
            text="",
        )
        grade = Grade(1.0, {}, Status.SCORED)
        return Group(0, Prompt("0", "", prompt, "memory"), (made,), (grade,))

    config = ModelConfig(vocab_size=VOCABULARY, context=2 * max(TOKENS), **SHAPE)
    policy = Transformer(config).init_weights(0).to(device).learn()
    train = TrainConfig(batch=1, precision=precision)
    objective = ObjectiveConfig(advantage="raw", loss="reinforce")
    learner = LocalLearner(policy, compile(objective), train)

    def step(count: int) -> None:
        batch = pack([batch_of(count)]).to(device)
        advantages = learner.program.advantages(batch, Scores())
        (learn,) = learner.program.batches(batch, advantages, Scores(), [Pack.whole(batch)])
        learner.step(learn)

    step(FEW)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    start = time.perf_counter()
    step(tokens)
    if on_gpu:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": peak - before, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds for each size")
    parser.add_argument("--child", action="store_true", help="measure one size in this process")
    args = parser.parse_args()
    if args.child:
        found = measure(args.tokens[0], args.device, args.precision, args.threads)
        print(json.dumps(found))
        return
    print(f"{'tokens':>8} {'peak MB':>9} {'kB/token':>9} {'seconds':>8}   {args.device}")
    for tokens in args.tokens:
        command = [sys.executable, __file__, "--child", "--tokens", str(tokens)]
        command += ["--device", args.device, "--precision", args.precision]
        command += ["--threads", str(args.threads)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.deadline)
        except subprocess.TimeoutExpired:
            print(f"{tokens:>8} not done within {args.deadline:.0f} s")
            continue
        if done.returncode:
            print(f"{tokens:>8} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        size = found["bytes"]
        told = f"{size / 1e6:>9,.0f} {size / tokens / 1e3:>9.1f} {found['seconds']:>8.1f}"
        print(f"{tokens:>8} {told}", flush=True)


if __name__ == "__main__":
    main()
