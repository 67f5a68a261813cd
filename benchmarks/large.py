"""A large model on one GPU: gradient steps with recomputation and offload, beside their estimates.

    python benchmarks/large.py                        everything, in about four minutes
    python benchmarks/large.py calibration            one part (calibration, large)
    python benchmarks/large.py --device cpu --tiny    tiny models, to test this script

"calibration" takes gradient steps on 16 × 1,024 tokens in the shape of Qwen2.5-1.5B, without and
with recomputation. "large" takes them in the shape of Qwen2.5-7B with recomputation and with
AdamW's moments in main memory (61 GB, pinned), on 16 × 1,024 tokens and on one response of 32,768
tokens after a prompt of 512. Then an engine beside the learner samples 32 × 256 tokens, loads the
learner's weights and samples again, and the learner takes another step.

Models have random weights, in bf16 over fp32 masters. Each step is printed with its seconds, of
which the optimizer's seconds, tokens per second, share of the measured rate of matrix products
(6 operations per weight and token, and 12 · context · width per layer for attention), and the peaks
of memory in GiB, allocated and reserved. "planned" figures are the estimates of `burnish plan` for
the same step, and a "ratio" is the estimate divided by the measurement. By the plan, learner and
engine need 95 GiB of GPU memory together. The script imports `gpu.py` from its own directory.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu import ROLLOUTS, TINY, Bench, finish, group, made_up, measure_ceilings, requests

from burnish.engine.native.engine import NativeEngine
from burnish.engine.settings import EngineSettings
from burnish.launch.memory import measure_model
from burnish.learner.learner import LocalLearner
from burnish.learner.program import compile
from burnish.machine import hardware
from burnish.model.transformer import ModelConfig
from burnish.recipe.costs import ENGINE, Size, gradient_seconds, needs, offload_seconds
from burnish.recipe.load import load_recipe
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import Recipe, TrainConfig
from burnish.rollout.packing import Pack, pack
from burnish.types import Scores

PARTS = ("calibration", "large")
LARGE = ModelConfig(
    vocab_size=152064,
    n_layers=28,
    d_model=3584,
    n_heads=28,
    n_kv_heads=4,
    d_ff=18944,
    context=40960,
    tied=False,
    family="qwen2",
)
SHORT = 16, 1, 1023
"""Responses, tokens of each prompt, tokens of each response."""
LONG = 1, 512, 32768
SAMPLED = 32, 128, 1, 256, False
"""Prompts, tokens of each, samples of each, new tokens, and whether lengths are spread."""
KV_MB = 4096
Case = tuple[int, int, int]


def small(case: Case) -> Case:
    """Return a case that takes a moment on a CPU."""
    return min(case[0], 2), min(case[1], 8), min(case[2], 256)


class Learning:
    """A learner of random weights, and the estimates of its steps."""

    def __init__(self, bench: Bench, config: ModelConfig, *, recompute: bool, offload: bool):
        self.bench = bench
        self.config = TINY if bench.tiny else config
        self.settings = {"precision": "bf16", "recompute": recompute, "offload": offload}
        train = TrainConfig(batch=16, learning_rate=1e-6, **self.settings)  # type: ignore[arg-type]
        objective = ObjectiveConfig(advantage="raw", loss="reinforce")  # type: ignore[arg-type]
        start = time.perf_counter()
        policy = bench.model(config, torch.float32).learn(recompute=recompute)
        bench.wait()
        built = time.perf_counter()
        self.learner = LocalLearner(policy, compile(objective), train)
        bench.wait()
        self.seconds = {"weights": built - start, "learner": time.perf_counter() - built}
        self.optimizer_seconds = 0.0
        self._take = self.learner.optimizer.step
        self.learner.optimizer.step = self._timed  # type: ignore[method-assign]

    def _timed(self, number: int, norm: float) -> float:
        self.bench.wait()
        start = time.perf_counter()
        rate = self._take(number, norm)
        self.bench.wait()
        self.optimizer_seconds += time.perf_counter() - start
        return rate

    def step(self, case: Case, index: int) -> None:
        """Take a gradient step on responses of random tokens."""
        rows, prompt, response = case
        bench, config = self.bench, self.config
        groups = [
            group(
                i,
                bench.tokens(prompt, config),
                [made_up(bench, config, index * rows + i, response)],
                bench.random,
            )
            for i in range(rows)
        ]
        batch = pack(groups).to(self.learner.device)
        program, scores = self.learner.program, Scores()
        advantages = program.advantages(batch, scores)
        (learn,) = program.batches(batch, advantages, scores, [Pack.whole(batch)])
        metrics = self.learner.step(learn)
        if metrics["train/skipped"]:
            raise RuntimeError(f"a gradient step was not finite: {metrics}")

    def measure(self, name: str, case: Case, steps: int) -> None:
        """Take a step to warm up and then ``steps`` steps; store their figures under ``name``."""
        bench = self.bench
        case = small(case) if bench.tiny else case
        bench.free()
        self.step(case, 0)
        self.optimizer_seconds = 0.0
        numbers = iter(range(1, steps + 1))
        seconds = bench.seconds(lambda: self.step(case, next(numbers)), steps)
        rows, prompt, response = case
        tokens, mean = rows * (prompt + response), (prompt + response) / 2
        size = self.size()
        width = self.config.n_heads * self.config.head_width
        work = tokens * (6 * size.parameters + 12 * mean * width * size.layers)
        planned = self.planned_seconds(size, tokens, mean)
        found: dict[str, Any] = {
            "seconds": round(seconds, 3),
            "of which the optimizer": round(self.optimizer_seconds / steps, 3),
            "tokens/s": round(tokens / seconds),
            "share": round(work / seconds / (bench.found["ceilings"]["TFLOP/s"] * 1e12), 3),
            "planned seconds": round(planned, 3),
            "ratio of seconds": round(planned / seconds, 3),
        }
        record(bench, name, found | self.memory(size, case))

    def size(self) -> Size:
        source: Any = SimpleNamespace(shape=self.config)
        return measure_model(source, {}, self.learner.train, "bf16", self.bench.device)

    def planned_seconds(self, size: Size, tokens: int, context: float) -> float:
        train, rates = self.learner.train, self.bench.found["rates"]
        return tokens * gradient_seconds(size, context, train, rates) + offload_seconds(size, train)

    def memory(self, size: Size, case: Case, *, has_engine: bool = False) -> dict[str, float]:
        """Return the peaks of GPU memory and the plan's estimate, in GiB; on a CPU, only the
        estimate."""
        size = size._replace(longest_prompt=case[1])
        parts = [
            need.size
            for need in needs(self.recipe(case), size)
            if need.resource == "memory" or (need.resource == "cache" and has_engine)
            if need.what != ENGINE or has_engine
        ]
        planned = sum(parts) / 2**30
        if not self.bench.is_gpu:
            return {"planned GiB": round(planned, 3)}
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {
            "GiB": round(peak / 2**30, 1),
            "reserved GiB": round(reserved / 2**30, 1),
            "planned GiB": round(planned, 1),
            "ratio of GiB": round(planned * 2**30 / peak, 3),
        }

    def recipe(self, case: Case) -> Recipe:
        """Return a recipe whose gradient step is that of the case."""
        rows, _, response = case
        given = {"batch": rows, "group_size": 1, "max_tokens": response}
        return load_recipe(
            {
                "task": "keywords",
                "model": {"name": "scratch", "tokenizer": "bytes"},
                "rollout": given,
                "objective": {"advantage": "raw", "loss": "reinforce"},
                "engine": {"kv_mb": KV_MB, "precision": "bf16"},
                "train": {"batch": rows, "learning_rate": 1e-6, **self.settings},
            }
        )


def record(bench: Bench, name: str, found: dict[str, Any]) -> None:
    bench.found[name] = found
    print(name, found, flush=True)


def calibrate(bench: Bench) -> None:
    """Take steps in the shape of 1.5 billion weights, without offload."""
    for recompute in (False, True):
        learning = Learning(bench, ROLLOUTS, recompute=recompute, offload=False)
        learning.measure("1.5B, 16 × 1,024 tokens" + ", recomputed" * recompute, SHORT, 3)
        del learning
        bench.free()


def measure_large(bench: Bench) -> None:
    """Take steps in the shape of 7 billion weights, and run the loop with an engine."""
    learning = Learning(bench, LARGE, recompute=True, offload=True)
    built = {name: round(seconds, 1) for name, seconds in learning.seconds.items()}
    record(bench, "7B, seconds to draw the weights, and to copy them and pin the moments", built)
    learning.measure("7B, 16 × 1,024 tokens", SHORT, 2)
    learning.measure("7B, a response of 32,768 tokens", LONG, 2)
    run_loop(bench, learning)


def run_loop(bench: Bench, learning: Learning) -> None:
    """Sample, publish, sample and learn, with the engine's weights beside the learner's."""
    bench.free()
    start = time.perf_counter()
    sampler = bench.model(LARGE)
    sampler.requires_grad_(False)
    kv_bytes = (64 if bench.tiny else KV_MB) << 20
    engine = NativeEngine(sampler, None, EngineSettings(kv_bytes=kv_bytes, max_running=SAMPLED[0]))
    case = small(LONG) if bench.tiny else LONG
    found: dict[str, Any] = {"engine": round(time.perf_counter() - start, 1)}
    for name in ("first rollout", "second rollout"):
        given = requests(bench, learning.config, SAMPLED, name)
        count = sum(one.n * one.params.max_tokens for one in given)
        seconds = bench.seconds(partial(finish, engine, given))
        found[name] = round(seconds, 2)
        found["tokens/s"] = round(count / seconds)
        found["publish"] = round(bench.seconds(lambda: engine.load(learning.learner.weights())), 2)
    found["step"] = round(bench.seconds(lambda: learning.step(case, 9)), 2)
    size = learning.size()
    record(bench, "7B, the loop", found | learning.memory(size, case, has_engine=True))


def table(found: dict[str, Any]) -> str:
    lines = ["| measurement | |", "| --- | --- |"]
    for name, value in found.items():
        shown = value
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {number:g}" for key, number in value.items())
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="file for the results, as JSON")
    args = parser.parse_args()
    hardware.set_up_torch(hardware.cores())
    parts = args.parts or list(PARTS)
    if wrong := set(parts) - set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(sorted(wrong))}")
    bench = Bench(args.device, tiny=args.tiny, repeats=1)
    start = time.perf_counter()
    measure_ceilings(bench)
    bench.free()
    seconds = 0.1 if args.tiny else 1.0
    bench.found["rates"] = hardware.measure_rates(seconds, precision="bf16", device=args.device)
    print(bench.found, flush=True)
    measure = {"calibration": calibrate, "large": measure_large}
    for part in parts:
        measure[part](bench)
        bench.free()
        if args.out is not None:
            args.out.write_text(json.dumps(bench.found, indent=1) + "\n")
    bench.found["seconds of this benchmark"] = round(time.perf_counter() - start)
    print(table(bench.found))


if __name__ == "__main__":
    main()
