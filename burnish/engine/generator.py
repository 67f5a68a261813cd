"""An engine as the loop's generator: a whole batch of prompts in, their completions out."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.draws import Stream
from burnish.engine.protocol import Engine, Request
from burnish.progress import Report, unheard
from burnish.types import Completion, Prompt, SamplingParams, Weights


class EngineGenerator:
    """Submits everything before the first step, so that the batches an engine runs, and with them
    the last bits of its logits, are the same whenever the same prompts come."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def load(self, weights: Weights) -> None:
        self.engine.load(weights)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        first_group: int,
        samples: int,
        params: SamplingParams,
        stream: int,
        report: Report = unheard,
    ) -> list[tuple[Completion, ...]]:
        names = [f"group-{first_group + k}" for k in range(len(prompts))]
        for k, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            place = first_group + k, Stream(stream)
            request = Request(name, prompt.token_ids, samples, params, *place, streamed=False)
            self.engine.submit(request)
        done: dict[tuple[str, int], Completion] = {}
        before, total = self.engine.sampled, len(prompts) * samples
        while self.engine.unfinished:
            for event in self.engine.step():
                if isinstance(event, Completion):
                    done[event.request_id, event.sample_index] = event
            report(len(done), total, tokens=self.engine.sampled - before)
        return [tuple(done[name, i] for i in range(samples)) for name in names]
