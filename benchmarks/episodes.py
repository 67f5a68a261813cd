"""Tokens per second of multi-turn episodes, as a share of single-turn sampling on the same engine.

    python benchmarks/episodes.py            a tool takes as long as a turn, twice as many episodes
                                             are live as rows decode
    python benchmarks/episodes.py --tool 0   the tool answers at once
    python benchmarks/episodes.py --live 1   as many episodes as rows

Both sample the same number of responses with the same number of sampled tokens. They take turns,
and only their ratio within one run means anything. The tool sleeps; its time is measured from a
round of single-turn sampling. A model of random weights reads bytes. Rows idle while the last
episodes wait for their tools: with more --waves, this end of a round counts less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Engine, Request
from burnish.engine.settings import EngineSettings
from burnish.environments.pool import EnvironmentPool
from burnish.machine import hardware
from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.rollout.episodes import EpisodeEngine, EpisodeLimits
from burnish.rollout.rollout import complete
from burnish.tasks.text import TODAY
from burnish.types import Episode, SamplingParams

TOOL = """
import time

class Tool:
    deterministic = True

    def reset(self, row, seed):
        self.seconds = row["seconds"]
        return "Begin."

    def step(self, message):
        time.sleep(self.seconds)
        return "ok"
"""
START = ({"role": "user", "content": "Begin."},)
CONTEXT = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16, help="responses that decode at once")
    parser.add_argument("--live", type=float, default=2.0, help="live episodes per row")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="sampled tokens of a turn")
    parser.add_argument("--tool", type=float, default=1.0, help="time of a call, in turns")
    parser.add_argument("--waves", type=int, default=4, help="episodes per live episode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    tokenizer = Tokenizer.of_bytes()
    shape = ModelConfig(
        tokenizer.vocab_size, n_layers=given.layers, d_model=given.width, n_heads=8,
        d_ff=4 * given.width, context=CONTEXT,
    )  # fmt: skip
    model = Transformer(shape).init_weights(0)
    settings = EngineSettings(kv_bytes=1 << 30, max_running=given.rows)
    print(f"{os.cpu_count()} cores, {hardware.processor()}, {torch.get_num_threads()} threads")
    conversation = ConversationFormat(tokenizer, now=TODAY)
    prompt = conversation.open(START)
    count, sampled = int(given.live * given.rows) * given.waves, given.turns * given.tokens

    def single() -> float:
        engine = NativeEngine(model, tokenizer, settings)
        params = SamplingParams(max_tokens=sampled, min_tokens=sampled)
        return run(engine, [Request(f"{i}", prompt, 1, params, i) for i in range(count)])

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tool.py").write_text(TOOL)
        environments = EnvironmentPool(f"{folder}/tool.py:Tool").start()
        single()
        seconds = given.tool * given.tokens * given.rows / single()
        print(f"a call of the tool takes {1000 * seconds:.0f} ms")
        row, most = {"seconds": seconds}, CONTEXT - len(prompt)
        params = SamplingParams(max_tokens=most, min_tokens=most)
        limits = EpisodeLimits(
            CONTEXT,
            turns=given.turns,
            turn_tokens=given.tokens,
            live=int(given.live * given.rows),
        )
        requests = [
            Request(f"{i}", prompt, 1, params, i, episode=Episode(row, 0, START))
            for i in range(count)
        ]
        shares: dict[str, list[float]] = {"free": [], "lockstep": []}
        for _ in range(given.rounds):
            alone = single()
            for pace, found in shares.items():
                inner = NativeEngine(model, tokenizer, settings)
                engine = EpisodeEngine(inner, environments, tokenizer, conversation, limits, pace)
                found.append(run(engine, requests) / alone)
        environments.close()
    for pace, found in shares.items():
        middle, low, high = statistics.median(found), min(found), max(found)
        print(f"{pace:9} {middle:.0%} of single-turn sampling ({low:.0%} to {high:.0%})")


def run(engine: Engine, requests: list[Request]) -> float:
    """Return the sampled tokens per second of some requests."""
    began = time.perf_counter()
    done = complete(engine, requests)
    tokens = sum(int(np.count_nonzero(c.sampled)) for group in done for c in group)
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
