"""A taskset of verifiers whose harness talks with the model in this process."""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class Letter(vf.TaskData):
    letter: str
    width: int = 1
    """Number of characters that count, beginning with the letter."""


class LettersConfig(vf.TasksetConfig):
    width: int = 1


class Task(vf.Task[Letter, vf.State]):
    @vf.reward
    async def share(self, task: Letter, trace: vf.Trace) -> float:
        """The share of characters that count, in all replies."""
        text = "".join(message.content or "" for message in trace.assistant_messages)
        first = ord(task.letter)
        return sum(first <= ord(char) < first + task.width for char in text) / max(1, len(text))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Letters(vf.Taskset[Task, LettersConfig]):
    def load(self):
        for letter in "abcdefghijkl":
            data = Letter(prompt=f"Write {letter}.", letter=letter, width=self.config.width)
            yield Task(data, self.config.task)


class Talk(vf.Harness[vf.HarnessConfig]):
    """Asks twice, the second time with a stream."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            create = client.chat.completions.create
            reply = await create(model=ctx.model, messages=messages)
            first = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": first}]
            messages += [{"role": "user", "content": "Again."}]
            async for _ in await create(model=ctx.model, messages=messages, stream=True):
                pass
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Letters", "Talk"]
