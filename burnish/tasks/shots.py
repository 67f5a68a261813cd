"""Few-shot prompts: solved rows of the training data before each held-out question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.tasks.pairs import MARKS
from burnish.tasks.task import Task, TooLong
from burnish.types import Completion, Grade, Prompt


class FewShot:
    """A task whose held-out prompts begin with its first training rows; all else is the task's."""

    def __init__(self, task: Task, shots: int, tokenizer: Tokenizer) -> None:
        self._task, self._tokenizer = task, tokenizer
        self.before = "".join(_solved(task.prompt(i)) for i in range(shots))

    def prompt(self, index: int) -> Prompt:
        return self._task.prompt(index)

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        return self._task.grade_all(pairs)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        return self._task.answer(prompt, response)

    def close(self) -> None:
        self._task.close()

    @property
    def too_long(self) -> TooLong:
        return self._task.too_long

    @property
    def validation(self) -> list[Prompt]:
        return [self._with_shots(prompt) for prompt in self._task.validation]

    def _with_shots(self, prompt: Prompt) -> Prompt:
        text = self.before + prompt.text
        return replace(prompt, text=text, token_ids=self._tokenizer.encode(text))


def _solved(prompt: Prompt) -> str:
    row = prompt.reference if isinstance(prompt.reference, Mapping) else {}
    # Of math rows, "answer" is a list of all that is right, and "solution" what leads there.
    answer = next((row[f] for f in ("answer", "solution") if isinstance(row.get(f), str)), None)
    if answer is None:
        raise DataError(
            f"validation.shots needs training rows with a text 'answer', {prompt.prompt_id} has "
            "none; use a task that has answers, or no shots"
        )
    return f"{row.get('prompt', prompt.text)} {MARKS.sub('', answer)}\n\n"
