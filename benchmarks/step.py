"""Seconds and memory of one whole GRPO step, of burnish and of TRL, in turns on the same prompts.

    python benchmarks/step.py --trl ENV/bin/python      ENV has trl 1.16.0, transformers, datasets
    python benchmarks/step.py                           burnish alone

A step: 4 prompts × 8 responses of exactly 32 tokens are sampled and graded, the policy takes one
gradient step without a KL term, and the sampler has the new weights. burnish runs `burnish.train`
on step.toml, run directory and all; TRL runs GRPOTrainer in fp32 and with bf16=True, and the better
one counts: one that takes a third longer in the first round leaves after it. Each lives in a
process of its own and waits between two steps for its turn; building, the first step and saving are
not measured. Only ratios inside one run mean anything.

The loss is the same, clipped, and a mean over tokens; so are the passes: with one step a rollout,
both take the log-probabilities of the policy before it from the step's own forward pass. TRL's
activation checkpointing, on by default, is off: it would be slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import Turns, Worker, spread

ROOT = Path(__file__).parents[1]
RECIPE = Path(__file__).with_name("step.toml")
PROMPTS, SAMPLES, NEW = 4, 8, 32  # as the recipe says
PRECISIONS = ("fp32", "bf16")
TRL = "1.16.0"


def recipe_of(args: argparse.Namespace) -> Any:
    from burnish.launch.models import with_own_precision
    from burnish.recipe.load import load_recipe

    return with_own_precision(load_recipe(str(RECIPE), [f"model.name={args.model}", *args.set]))


def serve_burnish(args: argparse.Namespace) -> None:
    import burnish
    from burnish.console.progress import Progress

    turns = Turns()

    def show(progress: Progress) -> None:
        """What the loop calls: after every step, once all of it is written down, it takes turns."""
        if progress.phase != "step":
            return
        whole = ("time/step", "time/other")  # they count from the step before, with the waiting
        phases = {k: v for k, v in progress.timings.items() if k.startswith("time/")}
        tokens = progress.metrics["rollout/length"] * progress.metrics["rollout/responses"]
        turns.wait({"tokens": tokens} | {k: v for k, v in phases.items() if k not in whole})

    with tempfile.TemporaryDirectory() as out:
        burnish.train(recipe_of(args), out=Path(out) / "run", show=show)


def serve_trl(args: argparse.Namespace) -> None:
    import os

    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, __version__

    from burnish.graders.keywords import inclusion  # the standard library is all it needs

    assert __version__ == TRL, f"the peer is trl {TRL}, got {__version__}"
    torch.set_num_threads(args.threads)
    turns, phases = Turns(), defaultdict[str, float](float)

    class Wait(TrainerCallback):  # type: ignore[misc]
        """A step lasts until the next one begins: its data and its log are part of it."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                tokens = phases.pop("tokens")
                phases["time/grade"] -= phases["time/generate"]
                turns.wait({"tokens": tokens} | phases)
            phases.clear()

    def rewards(completions: list[Any], keywords: list[list[str]], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [inclusion(*pair)["reward"] for pair in zip(texts, keywords, strict=True)]

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*given, **named)
            phases[name] += time.perf_counter() - start
            return result

        return call

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=args.precision == "bf16",
            per_device_train_batch_size=args.trl_batch,
            gradient_accumulation_steps=PROMPTS * SAMPLES // args.trl_batch,
            generation_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            num_iterations=1,
            max_completion_length=NEW,
            generation_kwargs={"min_new_tokens": NEW},
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            max_steps=1_000_000,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
        )
        rows = turns.wait({})
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            args=config,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=[rewards],
            callbacks=[Wait()],
        )
        generate = trainer.model.generate

        def counted(*given: Any, **named: Any) -> Any:
            ids = generate(*given, **named)
            phases["tokens"] += ids[:, named["input_ids"].shape[1] :].numel()
            return ids

        trainer.model.generate = timed("time/generate", counted)
        score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = timed("time/grade", score)
        trainer.train()


TRAINERS = {"burnish": serve_burnish, "trl": serve_trl}


def start(trainer: str, precision: str, args: argparse.Namespace) -> Worker:
    python = args.trl if trainer == "trl" else sys.executable
    command = [python, __file__, "--serve", trainer, "--precision", precision]
    command += ["--model", args.model, "--threads", str(args.threads)]
    command += ["--trl-batch", str(args.trl_batch)]
    command += [word for override in args.set for word in ("--set", override)]
    name = f"{trainer} {precision}"
    return Worker(name, command, threads=args.threads, PYTHONPATH=str(ROOT))


def prompts(args: argparse.Namespace, steps: int) -> tuple[list[dict[str, Any]], str]:
    """What burnish's task asks in so many steps, as rows that TRL takes; and the lengths."""
    from burnish.model.tokenizer import Tokenizer
    from burnish.tasks.keywords import make_keywords

    recipe = recipe_of(args)
    task = make_keywords(recipe.task, tokenizer=Tokenizer.load(args.model), seed=recipe.seed)
    made = [task.prompt(i) for i in range(PROMPTS * steps)]
    lengths = [len(prompt.token_ids) for prompt in made]
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt.reference["prompt"]}],
            "keywords": prompt.reference["keywords"],
        }
        for prompt in made
    ]
    return rows, f"{min(lengths)}–{max(lengths)}"


def compare(args: argparse.Namespace) -> None:
    rows, lengths = prompts(args, args.repeats + 2)  # the first warms up, the last only begins
    own = start("burnish", recipe_of(args).train.precision, args)
    peers = [start("trl", precision, args) for precision in PRECISIONS if args.trl]
    for peer in peers:
        peer.run(rows)
    print(
        f"one step: {PROMPTS} prompts of {lengths} tokens × {SAMPLES} samples × {NEW} new tokens, "
        f"{args.threads} threads, rounds: {args.repeats}"
    )
    answers: dict[str, list[dict[str, float]]] = {w.name: [] for w in [own, *peers]}
    for _ in range(args.repeats):
        for worker in [own, *peers]:
            answer = worker.run()
            assert answer["tokens"] == PROMPTS * SAMPLES * NEW, f"{worker.name}: other work"
            answers[worker.name].append(answer)
            print(f"  {worker.name} {answer['seconds']:.2f} s", file=sys.stderr, flush=True)
        fastest = min((answers[w.name][0]["seconds"] for w in peers), default=0)
        for worker in [w for w in peers if answers[w.name][0]["seconds"] > 1.33 * fastest]:
            peers.remove(worker)
            worker.close()
    for worker in [own, *peers]:
        worker.close()
    for name, given in answers.items():
        print(describe(name, given))
    if peers:
        name = min((w.name for w in peers), key=lambda n: median(answers[n], "seconds"))
        print(against(name, answers[own.name], answers[name]))


def describe(name: str, given: list[dict[str, float]]) -> str:
    """A trainer's medians, and where they go; what no phase claims is the rest."""
    phases = sorted({key for answer in given for key in answer if key.startswith("time/")})
    split = {key.removeprefix("time/"): median(given, key) for key in phases}
    rest = statistics.median(
        answer["seconds"] - sum(answer.get(key, 0) for key in phases) for answer in given
    )
    split["train and rest" if name.startswith("trl") else "rest"] = rest
    parts = ", ".join(f"{key} {seconds:.2f}" for key, seconds in split.items())
    return (
        f"  {name:12s} {column(given, 'seconds')} s, processor time {column(given, 'cpu')} s, "
        f"peak memory {given[-1]['rss_mb'] / 1024:.2f} GiB\n               {parts}"
    )


def against(name: str, mine: list[dict[str, float]], its: list[dict[str, float]]) -> str:
    def ratios(key: str) -> str:
        return spread([b[key] / a[key] for a, b in zip(mine, its, strict=True)])

    return (
        f"  {name} / burnish: {ratios('seconds')} times the seconds, {ratios('cpu')} times the "
        f"processor time, {its[-1]['rss_mb'] / mine[-1]['rss_mb']:.2f} times the memory"
    )


def column(given: list[dict[str, float]], key: str) -> str:
    return spread([answer[key] for answer in given])


def median(given: list[dict[str, float]], key: str) -> float:
    return statistics.median(answer.get(key, 0) for answer in given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", help=f"the python of an environment with trl {TRL}")
    parser.add_argument("--trl-batch", type=int, default=8, help="responses per pass of TRL's")
    parser.add_argument("--model", help="a model directory; by default burnish's default model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of burnish's recipe"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", choices=list(TRAINERS), help=argparse.SUPPRESS)
    parser.add_argument("--precision", choices=PRECISIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        TRAINERS[args.serve](args)
        return
    if args.model is None:
        from burnish.model import hub

        args.model = str(hub.resolve_model(hub.DEFAULT))
    compare(args)


if __name__ == "__main__":
    main()
