"""Models that say given texts, and chat templates, for tests of the endpoint."""

import numpy as np

from burnish.engine.protocol import Capabilities, completed
from burnish.types import Finish

HERMES = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|a|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|a|>assistant\n{% endif %}"
)
"""A template that writes tools and calls as Qwen's does."""


class Script:
    """An engine that samples the tokens of ``text``, some at a time, and records its requests."""

    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=True)

    def __init__(self, tokenizer, text="", at_once=3):
        self.tokenizer, self.text, self.at_once = tokenizer, text, at_once
        self.on_tokens = None
        self.running, self.requests, self.aborted = {}, [], []
        self.version = self.sampled = 0

    @property
    def unfinished(self):
        return len(self.running)

    def submit(self, request):
        self.requests.append(request)
        tokens = [*self.tokenizer.encode(self.text).tolist(), self.tokenizer.end_ids[0]]
        for sample in range(request.n):
            self.running[request.request_id, sample] = request, tokens, [0]

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.running = {key: one for key, one in self.running.items() if key[0] != request_id}

    def step(self):
        done = []
        for (name, sample), (request, tokens, place) in list(self.running.items()):
            start, end = place[0], min(place[0] + self.at_once, request.params.max_tokens)
            place[0], fresh = end, tokens[start:end]
            logprobs = [-0.5 - index for index in range(start, start + len(fresh))]
            if self.on_tokens is not None:
                self.on_tokens(name, sample, fresh, logprobs)
            if end >= min(len(tokens), request.params.max_tokens):
                del self.running[name, sample]
                shown = tokens[:end]
                is_whole = shown[-1] in self.tokenizer.end_ids
                ended = (Finish.STOP, shown[-1]) if is_whole else (Finish.LENGTH, None)
                text = self.tokenizer.decode(shown, skip_special=True)
                given = [-0.5 - index for index in range(len(shown))]
                recorded = np.array(shown), given, [0] * len(shown)
                done.append(completed(request, sample, recorded, (*ended, text)))
        return done
