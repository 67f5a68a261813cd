"""The tokenizer: encodes text to token ids, and decodes them. No other module does this."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

from burnish.errors import ModelError
from burnish.model.control_tokens import AnyValue, ControlTokens
from burnish.types import IntArray


@dataclass(eq=False)
class Tokenizer:
    """A `tokenizers` pipeline, a model's chat template, and the ids of its end tokens."""

    backend: tokenizers.Tokenizer
    end_ids: tuple[int, ...] = ()
    """Ids of tokens that end a response."""
    special: Mapping[str, str] = field(default_factory=dict)
    """Token strings by role, such as {"bos_token": "<s>"}, for chat templates."""
    chat_template: str | None = None
    """The template as Jinja source; None if the model has none."""

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load the tokenizer of a model directory. Raise a ModelError if tokenizer.json can't be
        read.

        The end ids come from the first of generation_config.json, config.json and
        tokenizer_config.json that names one; there may be none.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises this class
            raise ModelError(
                f"{file} can't be read ({error}); burnish reads tokenizer.json files only"
            ) from error

        def read(name: str) -> Any:
            path = directory / name
            try:
                return json.loads(path.read_text()) if path.exists() else {}
            except ValueError as error:
                raise ModelError(
                    f"{path} is not a JSON file: {error}; download the model again"
                ) from error

        settings = read("tokenizer_config.json")
        special = {
            role: value["content"] if isinstance(value, dict) else value
            for role, value in settings.items()
            if role.endswith("_token") and isinstance(value, str | dict)
        }
        template = settings.get("chat_template")
        if (directory / "chat_template.jinja").exists():
            template = (directory / "chat_template.jinja").read_text()
        files = ("generation_config.json", "config.json")
        candidates = [read(name).get("eos_token_id") for name in files]
        candidates.append(backend.token_to_id(special.get("eos_token", "")))
        ends: int | list[int] = next((end for end in candidates if end is not None), [])
        end_ids = tuple(ends) if isinstance(ends, list) else (ends,)
        return cls(backend, end_ids, special, template)

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """Build a tokenizer with a token for each byte of UTF-8 and an end token."""
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(
            models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<end>"])
        return cls(backend, (len(pieces),), {"eos_token": "<end>"})

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have a text; a model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_special: bool = True) -> IntArray:
        """Return the token ids [T] of a text. With ``add_special``, add the special tokens that the
        model puts around any text, such as Llama's BOS.

        Special tokens in the text itself become single ids, unless they are masked: ``mask`` a text
        that is not trusted before it is encoded, or inserted into another text.
        """
        return np.array(self._control.encode(text, add_special=add_special), np.int32)

    def mask(self, value: AnyValue) -> AnyValue:
        """Return a text, or an object of JSON with texts, whose special tokens are masked: `encode`
        encodes them as plain text. A value without special tokens is returned as it is."""
        return self._control.mask(value)

    def unmask(self, text: str) -> str:
        """Return a text with masks as the text that they stand for, for display."""
        return self._control.unmask(text)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.backend, self.end_ids, self.special.values())

    def decode(self, ids: Sequence[int] | IntArray, *, skip_special: bool = False) -> str:
        """Return the text of token ids; with ``skip_special``, without the special tokens."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self) -> Callable[[int], str | None]:
        """Return a function that decodes the token ids of one text, one call per id. A call returns
        the text that its token completes, or None if the token completes no text.

        A character that consists of several tokens appears with its last token. Special tokens have
        no text. Use a new function for each text.
        """
        return partial(decoders.DecodeStream(skip_special_tokens=True).step, self.backend)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now: datetime | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        generate: bool = True,
    ) -> str:
        """Format messages with the model's chat template, up to the start of the assistant's
        answer, or without ``generate`` up to the end of the last message. ``now`` is the date that
        a template may insert; None for the current one. ``tools`` are JSON schemas of functions.

        The text contains the template's special tokens: encode it with ``add_special=False``. Those
        that the messages and tools contain are masked; use `unmask` to show the text. Raises a
        ModelError if there is no chat template, or if it rejects the messages.
        """
        if self.chat_template is None:
            raise ModelError(
                "this model has no chat template; set task.chat = false, and give prompts as plain "
                "texts"
            )
        try:
            return _compiled(self.chat_template).render(
                **self.special,
                messages=self.mask(messages),
                add_generation_prompt=generate,
                tools=self.mask(list(tools))
                or None,  # templates test `tools is none`, not whether it is empty
                documents=None,
                strftime_now=(now or datetime.now()).strftime,
            )
        except TemplateError as error:
            raise ModelError(f"the chat template rejected these messages: {error}") from error
        except Exception as error:  # of the template's own operations, or its deep recursion
            said = f"{type(error).__name__}: {error}"
            raise ModelError(f"the chat template can't write these messages: {said}") from error

    def save(self, directory: Path | str) -> None:
        """Write tokenizer, chat template and end ids to an existing directory, so that `load` and
        transformers can read them. Files of the same name, among them generation_config.json, are
        replaced."""
        directory = Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        # This class uses tokenizer.json unchanged; a model's class may rebuild it.
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        generation = {"eos_token_id": list(self.end_ids)} if self.end_ids else {}
        files = {"tokenizer_config.json": settings, "generation_config.json": generation}
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (directory / name).write_text(text + "\n")


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """Compile a chat template with the helper functions that transformers provides. It runs in a
    sandbox, because templates come with the model and are not trusted."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)
