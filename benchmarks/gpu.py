"""Speed on one GPU: its ceilings, rollouts, training, and a whole GRPO step with its split.

    python benchmarks/gpu.py                          everything, in less than eight minutes
    python benchmarks/gpu.py rollouts --repeats 3     one part (ceilings, rollouts, training, step)
    python benchmarks/gpu.py --profile                the kernels of a decoding step and of a
                                                      training step, and the time between them
    python benchmarks/gpu.py --vllm V/bin/python --trl T/bin/python
                                                      with peers; at most eight minutes
    python benchmarks/gpu.py --device cpu --tiny      tiny models, to test this script

Models have random weights, and no sample ends before its maximum length. Rollouts and training use
the shape of Qwen2.5-1.5B, and the step that of SmolLM2-1.7B: 32 prompts of 105 tokens × 8 responses
of 256 tokens, and one gradient step in bf16 over fp32 weights. Rollouts count the new tokens, with
their log-probabilities, and include prefill. Training computes forward and backward passes of 16 ×
1,024 tokens; its share of the measured rate of matrix products counts 6 operations per weight and
token. To measure another version of burnish, put its directory into PYTHONPATH.

Peers run after burnish, one at a time and each in its own environment, for at most --peer-seconds.
`--vllm` measures the same rollouts with vLLM: random weights of the same shape, log-probabilities,
and prefill. `--trl` measures the same step with TRL's GRPOTrainer: bf16 autocast over fp32 weights,
AdamW, 32 responses per pass, no KL term and no activation checkpointing. If its environment has
vllm, TRL samples with vLLM in the same process, with and without its importance correction, else
with transformers. A peer that fails is a row of the table, and the JSON has the end of its output.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_table import table
from peers import measure_peer, texts, write_config, write_tokenizer

from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.learner.learner import LocalLearner
from burnish.learner.program import compile
from burnish.machine import hardware
from burnish.model.checkpoint import save_model
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import pack, train_batches
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams, Weights

PARTS = ("ceilings", "rollouts", "training", "step")
ROLLOUTS = ModelConfig(
    vocab_size=151936,
    n_layers=28,
    d_model=1536,
    n_heads=12,
    n_kv_heads=2,
    d_ff=8960,
    context=4096,
    family="qwen2",
)
STEP = ModelConfig(vocab_size=49152, n_layers=24, d_model=2048, n_heads=32, d_ff=8192, context=8192)
TINY = ModelConfig(  # 32 is the smallest width of a head that vLLM runs on CPUs
    vocab_size=512, n_layers=2, d_model=128, n_heads=4, n_kv_heads=2, d_ff=128, context=4096
)
CASES = {  # prompts, prompt tokens, samples of each, new tokens, spread
    "256 at once, 128 + 256": (256, 128, 1, 256, False),
    "1,024 at once": (1024, 128, 1, 256, False),
    "32 at once": (32, 128, 1, 256, False),
    "one": (1, 128, 1, 256, False),
    "lengths spread 16 to 256, 256 at once": (256, 128, 1, 256, True),
    "256 at once, an end id held back by min_tokens": (256, 128, 1, 256, None),
    "32 × 8 sharing 1,024 tokens": (32, 1024, 8, 256, False),
}
PROMPTS, PROMPT, SAMPLES, NEW = 32, 105, 8, 256
KV_GB = 40
STEP_NAMES = {False: "step", True: "step with an importance correction"}
PEERS = {"vllm": "rollouts", "trl": "step"}
"""The part that each peer is compared with."""


class Bench:
    """One device and its clock."""

    def __init__(self, device: str, *, tiny: bool, repeats: int) -> None:
        self.device, self.tiny, self.repeats = device, tiny, repeats
        self.random = np.random.default_rng(0)
        self.found: dict[str, Any] = {"torch": torch.__version__}
        if self.is_gpu:
            self.found["gpu"] = torch.cuda.get_device_name()

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def seconds(self, run: Callable[[], Any], count: int = 1) -> float:
        """Mean seconds of a call, once the device is done."""
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            run()
        self.wait()
        return (time.perf_counter() - start) / count

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def model(self, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Transformer:
        config = TINY if self.tiny else config
        with torch.device(self.device):
            model = Transformer(config).to(dtype)
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim > 1:
                    p.normal_(0, 0.02, generator=generator)
                else:
                    p.fill_(0.0 if name.endswith("bias") else 1.0)
        return model

    def tokens(self, count: int, config: ModelConfig) -> np.ndarray:
        return self.random.integers(0, config.vocab_size, count).astype(np.int32)

    def peak_gib(self) -> float | None:
        return round(torch.cuda.max_memory_allocated() / 2**30, 1) if self.is_gpu else None

    def free(self) -> None:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def measure_ceilings(bench: Bench) -> None:
    """Copy bandwidth in TB/s, bytes read and written, and bf16 products in TFLOP/s."""
    size = 256 if bench.tiny else 8192
    x, y = torch.randn(2, size, size, device=bench.device).bfloat16()
    source = torch.randn((1 if bench.tiny else 1024) << 20, device=bench.device)
    target = torch.empty_like(source)
    for run in (lambda: x @ y, lambda: target.copy_(source)):
        bench.seconds(run, 3)
    products = 2 * size**3 / bench.seconds(lambda: x @ y, 20)
    copied = 2 * source.nbytes / bench.seconds(lambda: target.copy_(source), 20)
    bench.found["ceilings"] = {"TFLOP/s": products / 1e12, "TB/s": copied / 1e12}


def sizes(bench: Bench, case: tuple[Any, ...]) -> tuple[int, list[int]]:
    """Return the length of the prompts of a case, and the number of new tokens of each."""
    count, length, _, new, spread = case
    if bench.tiny:
        count, length, new = min(count, 8), min(length, 32), 24
    if not spread:
        return length, [new] * count
    return length, bench.random.integers(min(16, new), new + 1, count).tolist()


def requests(bench: Bench, config: ModelConfig, case: tuple[Any, ...], tag: str) -> list[Request]:
    _, _, samples, _, spread = case
    length, new = sizes(bench, case)
    made = []
    for i, most in enumerate(new):
        ends = {"min_tokens": most, "stop_ids": (2,)} if spread is None else {}
        params = SamplingParams(max_tokens=most, temperature=1.0, **ends)
        made.append(Request(f"{tag}{i}", bench.tokens(length, config), samples, params, i))
    return made


def finish(engine: NativeEngine, given: list[Request]) -> list[Completion]:
    for one in given:
        engine.submit(one)
    done = []
    while engine.unfinished:
        done += engine.step()
    return done


def engine_for(bench: Bench, model: Transformer, running: int) -> NativeEngine:
    size = 1 << 26 if bench.tiny else KV_GB << 30
    return NativeEngine(
        model, None, EngineSettings(kv_bytes=size, max_running=running, step_tokens=16384)
    )


def measure_rollouts(bench: Bench) -> None:
    """Tokens per second of each case; the median of the repetitions."""
    model = bench.model(ROLLOUTS)
    rates = bench.found["rollouts"] = {}
    for name, case in CASES.items():
        engine = engine_for(bench, model, case[0] * case[2])
        finish(engine, requests(bench, model.config, case, "warm-up "))
        found = []
        for repeat in range(bench.repeats):
            given = requests(bench, model.config, case, f"{repeat} ")
            count = sum(one.n * one.params.max_tokens for one in given)
            found.append(count / bench.seconds(partial(finish, engine, given)))
        rates[name] = {"tokens/s": round(statistics.median(found)), "all": [*map(round, found)]}
        print(name, rates[name], flush=True)
        del engine
        bench.free()


def group(index: int, prompt: np.ndarray, responses: list[Completion], random: Any) -> Group:
    grades = tuple(Grade(float(reward)) for reward in random.normal(size=len(responses)))
    return Group(index, Prompt(f"p{index}", "", prompt, "t"), tuple(responses), grades)


def made_up(bench: Bench, config: ModelConfig, index: int, length: int) -> Completion:
    numbers = np.zeros(length, np.int32)
    streams = bench.tokens(length, config), np.full(length, -1, np.float32), numbers
    is_sampled = np.ones(length, bool)
    params = SamplingParams()
    return Completion(str(index), 0, *streams, is_sampled, params, Finish.STOP, None, "")


def measure_training(bench: Bench) -> None:
    """Tokens per second, share of the measured rate and peak memory, with and without
    recomputation of activations."""
    model = bench.model(ROLLOUTS)
    rows, length = (2, 64) if bench.tiny else (16, 1024)
    weights = sum(p.numel() for p in model.parameters())
    for recompute in (False, True):
        model.learn(recompute=recompute)
        bench.free()
        step = training_step(bench, model, rows, length)
        bench.seconds(step, 2)
        rate = rows * length / bench.seconds(step, 3)
        share = 6 * weights * rate / (bench.found["ceilings"]["TFLOP/s"] * 1e12)
        name = f"training, {rows} × {length} tokens" + ", recomputed" * recompute
        bench.found[name] = {
            "tokens/s": round(rate),
            "share": round(share, 3),
            "GiB": bench.peak_gib(),
        }
        print(name, bench.found[name], flush=True)


def training_step(bench: Bench, model: Transformer, rows: int, length: int) -> Callable[[], None]:
    """A forward and backward pass over rows of this length; prompts are a single token."""
    groups = [
        group(
            i,
            bench.tokens(1, model.config),
            [made_up(bench, model.config, i, length - 1)],
            bench.random,
        )
        for i in range(rows)
    ]
    batch = pack(groups).to(bench.device)

    def step() -> None:
        measured = model.score(batch)
        (-measured.logprobs.sum() / (rows * length)).backward()
        model.zero_grad(set_to_none=True)

    return step


def measure_step(bench: Bench) -> None:
    """Seconds of whole GRPO steps by phase, median without the first step; peak memory."""
    from burnish.engine.settings import EngineSettings as Settings

    samples = PROMPTS * SAMPLES
    for importance in (False, True):
        bench.free()
        policy = bench.model(STEP, torch.float32).learn()
        sampler = bench.model(STEP)
        sampler.requires_grad_(False)
        kv_bytes = 1 << 26 if bench.tiny else 16 << 30
        engine = NativeEngine(sampler, None, Settings(kv_bytes=kv_bytes, max_running=samples))
        pieces = {"advantage": "group_zscore", "loss": "clip", "reduction": "token_mean"}
        program = compile(
            ObjectiveConfig(**pieces, **({"importance": "truncate"} if importance else {}))
        )
        settings = {"micro_tokens": 16384, "learning_rate": 1e-6, "precision": "bf16"}
        learner = LocalLearner(policy, program, TrainConfig(batch=samples, epochs=1, **settings))
        splits = [whole_step(bench, engine, learner, n) for n in range(1 + max(2, bench.repeats))]
        first, *rest = splits
        median = {phase: round(statistics.median(s[phase] for s in rest), 3) for phase in first}
        name = STEP_NAMES[importance]
        bench.found[name] = median | {
            "whole": round(statistics.median(sum(s.values()) for s in rest), 3),
            "first": round(sum(first.values()), 1),
            "GiB": bench.peak_gib(),
        }
        print(name, bench.found[name], flush=True)
        del policy, sampler, engine, learner, splits


def whole_step(
    bench: Bench, engine: NativeEngine, learner: LocalLearner[Any], number: int
) -> dict[str, float]:
    """Sample, score, learn and publish; return the seconds of each phase."""
    config = learner.policy.config  # type: ignore[attr-defined]
    case = (PROMPTS, PROMPT, SAMPLES, NEW, False)
    given = requests(bench, config, case, f"{number} ")
    seconds: dict[str, float] = {}
    done: list[Completion] = []
    seconds["generate"] = bench.seconds(lambda: done.extend(finish(engine, given)))
    by_request: dict[str, list[Completion]] = {}
    for one in done:
        by_request.setdefault(one.request_id, []).append(one)
    groups = [
        group(i, one.prompt, by_request[one.request_id], bench.random)
        for i, one in enumerate(given)
    ]

    def score() -> None:
        nonlocal batch, parts, scores
        batch = pack(groups, learner.program.graded).to(learner.device)
        parts = train_batches(batch, learner.train.batch, count=1)
        scores = learner.score(batch, parts)

    batch = parts = scores = None
    learner.begin(number)
    seconds["score"] = bench.seconds(score)

    def learn() -> None:
        advantages = learner.program.advantages(batch, scores)
        metrics = [
            learner.step(part) for part in learner.program.batches(batch, advantages, scores, parts)
        ]
        bench.found["gap"] = {k: v for k, v in metrics[0].items() if "mismatch" in k}

    seconds["learn"] = bench.seconds(learn)
    learner.finish()

    def publish() -> None:
        weights: Weights = learner.weights()
        engine.load(weights)

    seconds["publish"] = bench.seconds(publish)
    return seconds


def profile(bench: Bench, parts: list[str]) -> None:
    """Print the kernels of eight decoding steps and of one training step, by their time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    def show(name: str, run: Callable[[], Any], count: int) -> None:
        run()
        wall = bench.seconds(run)
        activities = [ProfilerActivity.CUDA] if bench.is_gpu else [ProfilerActivity.CPU]
        with recorded(activities=activities) as record:
            run()
            bench.wait()
        kernels: dict[str, list[float]] = {}
        for event in record.events():
            time_us = event.device_time if bench.is_gpu else event.self_cpu_time_total
            entry = kernels.setdefault(event.name, [0, 0])
            entry[0] += 1
            entry[1] += time_us
        busy = sum(us for _, us in kernels.values())
        number = sum(n for n, _ in kernels.values())
        print(
            f"\n{name}: {wall * 1e3 / count:.2f} ms, of which the device works "
            f"{busy / 1e3 / count:.2f} ms in {number / count:.0f} kernels"
        )
        for kernel, (n, us) in sorted(kernels.items(), key=lambda item: -item[1][1])[:30]:
            print(f"{us / 1e3 / count:9.3f} ms {n / count:8.1f} × {kernel[:100]}", flush=True)

    def decoding(config: ModelConfig, case: tuple[Any, ...]) -> None:
        model = bench.model(config)
        engine = engine_for(bench, model, case[0] * case[2])
        for tag in ("a", "b"):  # the second has its graphs
            for one in requests(bench, model.config, case, tag):
                engine.submit(one)
            engine.step()
            while engine.unfinished and tag == "a":
                engine.step()
        rows, before = engine.unfinished, engine.sampled
        while engine.sampled - before < rows * (4 if bench.tiny else case[3] // 2):
            engine.step()
        before = engine.sampled
        engine.step()
        steps = round((engine.sampled - before) / rows)
        show(f"decoding, {case[0]} × {case[2]} samples", engine.step, max(1, steps))
        bench.free()

    if "rollouts" in parts:
        for name in ("256 at once, 128 + 256", "one"):
            decoding(ROLLOUTS, CASES[name])
    if "step" in parts:
        decoding(STEP, (PROMPTS, PROMPT, SAMPLES, NEW, False))
    if "training" in parts:
        model = bench.model(ROLLOUTS).learn()
        rows, length = (2, 64) if bench.tiny else (16, 1024)
        show("training", training_step(bench, model, rows, length), 1)


def vllm_job(bench: Bench, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Write vLLM's model; return the job and the names of its cases."""
    config = TINY if bench.tiny else ROLLOUTS
    write_config(directory, config.to_hf())
    cases = {}
    # The case that real runs use least is the last, in case the time is short.
    for name, case in sorted(CASES.items(), key=lambda item: item[1][4] is None):
        length, new = sizes(bench, case)
        cases[name] = {"prompt": length, "samples": case[2], "new": new}
        cases[name]["min_tokens"] = case[4] is None
    return {"cases": cases, "vocabulary": config.vocab_size}, [*cases]


def trl_job(bench: Bench, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Write TRL's model with weights and a tokenizer; return the job and the names of the steps."""
    model = bench.model(STEP)
    save_model(model, directory, more={"bos_token_id": 0, "eos_token_id": 2})
    write_tokenizer(directory, model.config.vocab_size)
    length, new = sizes(bench, (PROMPTS, PROMPT, SAMPLES, NEW, False))
    job = {"prompts": texts(len(new), length), "samples": SAMPLES, "new": new[0]}
    return job, [*STEP_NAMES.values()]


def compare(bench: Bench, peer: str, python: str, seconds: float, save: Callable[[], None]) -> None:
    """Measure a peer, and save and print each of its measurements."""
    answers = bench.found.setdefault("peers", {}).setdefault(peer, {})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        directory = Path(folder) / "model"
        job, names = (vllm_job if peer == "vllm" else trl_job)(bench, directory)
        bench.free()
        job |= {"model": str(directory), "device": bench.device, "repeats": bench.repeats}
        for name, figures in measure_peer(peer, python, job, names, seconds):
            answers[name] = figures
            save()
            print(
                f"{peer}, {name}", figures | {"output": "below"} if "output" in figures else figures
            )
    for line in answers.get("failure", {}).get("output", []):
        print(f"{peer}: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="file for the results, as JSON")
    for peer, part in PEERS.items():
        help = f"Python of an environment with {peer}, to compare its {part}"
        parser.add_argument(f"--{peer}", metavar="PYTHON", help=help)
    parser.add_argument(
        "--peer-seconds", type=float, default=180, help="limit of each peer, its start included"
    )
    args = parser.parse_args()
    hardware.set_up_torch(torch.get_num_threads())
    parts = args.parts or list(PARTS)
    if wrong := set(parts) - set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(sorted(wrong))}")
    peers = {peer: getattr(args, peer) for peer in PEERS if getattr(args, peer)}
    if unused := [peer for peer in peers if PEERS[peer] not in parts or args.profile]:
        needed = ", ".join(f"--{peer} needs the part {PEERS[peer]}" for peer in unused)
        parser.error(f"{needed}, and no --profile")
    bench = Bench(args.device, tiny=args.tiny, repeats=args.repeats)
    if args.profile:
        profile(bench, parts)
        return
    measure = {
        "ceilings": measure_ceilings,
        "rollouts": measure_rollouts,
        "training": measure_training,
        "step": measure_step,
    }

    def save() -> None:
        if args.out is not None:
            args.out.write_text(json.dumps(bench.found, indent=1) + "\n")

    for part in dict.fromkeys(["ceilings", *parts]):
        measure[part](bench)
        bench.free()
        save()
    for peer, python in peers.items():
        compare(bench, peer, python, args.peer_seconds, save)
    print(table(bench.found))


if __name__ == "__main__":
    main()
