"""One peer of gpu.py in an environment of its own: rollouts of vLLM, or GRPO steps of TRL.

    PYTHON benchmarks/gpu_peers.py vllm JOB.json
    PYTHON benchmarks/gpu_peers.py trl JOB.json

`peers.py` writes the job and starts this script. Each measurement is printed once it is done, as a
line of JSON with its name behind `turns.MARK`, so that a process that fails or is killed later
loses only the measurements that follow. burnish is not imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import MARK

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles kernels when it is first used
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}
"""Settings without which the peers look for a network; the caller's own values have priority."""
MICRO = 32
"""Responses per forward and backward pass of TRL."""


def answer(name: str, **figures: Any) -> None:
    print("\n" + MARK + json.dumps({"name": name, **figures}), flush=True)  # after a progress bar


def measure_vllm(job: dict[str, Any]) -> None:
    """Tokens per second of each case, with the sampled tokens' log-probabilities; the median of the
    repetitions. As in gpu.py, one more before them is not counted."""
    start = time.perf_counter()
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    cases = job["cases"]
    llm = LLM(
        model=job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=max(len(case["new"]) * case["samples"] for case in cases.values()),
        max_num_batched_tokens=16384,
        gpu_memory_utilization=0.8,
        seed=0,
    )
    ready = round(time.perf_counter() - start, 1)
    answer("about", vllm=vllm.__version__, torch=torch.__version__, ready_s=ready)
    rng = random.Random(0)

    def rate(case: dict[str, Any]) -> float:
        prompts = [
            {"prompt_token_ids": rng.choices(range(job["vocabulary"]), k=case["prompt"])}
            for _ in case["new"]
        ]
        params = []
        for new in case["new"]:
            ends = {"min_tokens": new, "stop_token_ids": [2]} if case["min_tokens"] else {}
            params.append(
                SamplingParams(
                    n=case["samples"],
                    temperature=1.0,
                    max_tokens=new,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0,
                    **ends,
                )
            )
        begin = time.perf_counter()
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        samples = [sample for out in done for sample in out.outputs]
        count = sum(len(sample.token_ids) for sample in samples)
        expected = sum(case["new"]) * case["samples"]
        assert count == expected, f"{count} tokens instead of {expected}"
        assert count == sum(len(sample.logprobs) for sample in samples), "log-probabilities lack"
        return count / seconds

    for name, case in cases.items():
        _, *rates = [rate(case) for _ in range(1 + job["repeats"])]
        answer(name, **{"tokens/s": round(statistics.median(rates)), "all": [*map(round, rates)]})


def measure_trl(job: dict[str, Any]) -> None:
    """Seconds of whole steps by phase, median, and peak memory; the process ends with the last.

    TRL samples with vLLM in its own process if the environment has vllm: first with TRL's default
    importance correction, then without it. Else it samples with transformers, and has no
    correction. A step lasts until the next one begins. Phases: generate, score (the forward pass
    before the step), learn (forward, backward and optimizer), publish (new weights for vLLM), and
    rest (rewards, advantages, text and padding).
    """
    start = time.perf_counter()
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    is_gpu, has_vllm = job["device"].startswith("cuda"), importlib.util.find_spec("vllm")
    sync = torch.cuda.synchronize if is_gpu else (lambda: None)
    counted = max(2, job["repeats"])
    corrected = ("step with an importance correction", True, 2) if has_vllm else None
    plans = [plan for plan in (corrected, ("step", False, 1 if has_vllm else 2)) if plan]
    phases, splits = defaultdict[str, float](float), list[dict[str, float]]()
    begin = 0.0

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal begin
            sync()
            now = time.perf_counter()
            if begin:
                finish_step(now - begin)
            phases.clear()
            begin = time.perf_counter()

    def finish_step(whole: float) -> None:
        tokens, sampling = phases.pop("tokens"), phases.pop("sampling")
        assert tokens == job["samples"] * len(job["prompts"]) * job["new"], f"{tokens:.0f} tokens"
        named = ("generate", "score", "publish")
        split = {phase: phases[phase] for phase in named}
        splits.append(
            {**split, "learn": whole - sampling, "rest": sampling - sum(split.values())}
            | {"whole": whole}
        )
        name, _, skipped = plans[0]
        print(f"{name}: {splits[-1]}", flush=True)
        if is_gpu and len(splits) == skipped:
            torch.cuda.reset_peak_memory_stats()
        if len(splits) < skipped + counted:
            return
        rest = splits[skipped:]
        median = {k: round(statistics.median(s[k] for s in rest), 3) for k in rest[0]}
        gib = round(torch.cuda.max_memory_allocated() / 2**30, 1) if is_gpu else None
        answer(name, **median, GiB=gib)
        splits.clear()
        del plans[0]
        if not plans:
            os._exit(0)  # vLLM's and torch.distributed's shutdown take seconds
        trainer.vllm_importance_sampling_correction = plans[0][1]

    def timed(owner: Any, method: str, phase: str) -> None:
        function = getattr(owner, method)

        def call(*given: Any, **named: Any) -> Any:
            if phase == "score" and torch.is_grad_enabled():
                return function(*given, **named)  # the step's own forward pass
            sync()
            begin = time.perf_counter()
            result = function(*given, **named)
            sync()
            phases[phase] += time.perf_counter() - begin
            return result

        setattr(owner, method, call)

    colocated = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 512,
    }
    samples = len(job["prompts"]) * job["samples"]
    micro = min(MICRO, samples)
    steps = sum(skipped + counted for _, _, skipped in plans) + 1
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=Path(job["model"]).parent),
        use_cpu=not is_gpu,
        bf16=is_gpu,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=job["samples"],
        num_iterations=1,
        max_completion_length=job["new"],
        generation_kwargs={"ignore_eos": True} if has_vllm else {"min_new_tokens": job["new"]},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if is_gpu else "adamw_torch",
        max_grad_norm=1.0,
        weight_decay=0.0,
        max_steps=steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=is_gpu,
        seed=0,
        **(colocated if has_vllm else {}),
    )
    trainer = GRPOTrainer(
        model=job["model"],
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": text} for text in job["prompts"] * (steps + 1)]
        ),
        reward_funcs=[lambda completions, **_: [float(len(text) % 7) for text in completions]],
        callbacks=[Clock()],
    )
    timed(trainer, "_generate_and_score_completions", "sampling")
    timed(trainer, "_get_per_token_logps_and_entropies", "score")
    if has_vllm:
        timed(trainer.vllm_generation, "sync_weights", "publish")
        timed(trainer.vllm_generation.llm, "generate", "generate")
    else:
        timed(trainer.model, "generate", "generate")
    turn = trainer._generate_single_turn

    def count_tokens(*given: Any, **named: Any) -> Any:
        sampled = turn(*given, **named)
        phases["tokens"] += sum(map(len, sampled[0]))
        return sampled

    trainer._generate_single_turn = count_tokens
    about = {"trl": trl.__version__, "torch": torch.__version__}
    if has_vllm:
        about["vllm"] = sys.modules["vllm"].__version__
    else:
        missing = "needs vllm in TRL's environment; TRL samples with transformers"
        answer("step with an importance correction", missing=missing)
    answer("about", **about, ready_s=round(time.perf_counter() - start, 1))
    trainer.train()


PEERS: dict[str, Callable[[dict[str, Any]], None]] = {"vllm": measure_vllm, "trl": measure_trl}


def main() -> None:
    peer, job = sys.argv[1:]
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    PEERS[peer](json.loads(Path(job).read_text()))


if __name__ == "__main__":
    main()
