"""Text to ids and back: the only place where that happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

from burnish.errors import ModelError
from burnish.types import IntArray


@dataclass(eq=False)
class Tokenizer:
    """A `tokenizers` pipeline, a model's chat template, and the ids that end its responses."""

    backend: tokenizers.Tokenizer
    end_ids: tuple[int, ...] = ()
    """Each of these ends a response."""
    special: Mapping[str, str] = field(default_factory=dict)
    """Token strings by role, such as {"bos_token": "<s>"}, for templates."""
    chat_template: str | None = None

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From a model directory with a tokenizer.json."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(
                f"{file} can't be read ({error}); burnish reads tokenizers in that form only"
            ) from error

        def read(name: str) -> Any:
            path = directory / name
            return json.loads(path.read_text()) if path.exists() else {}

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
        said = [read(name).get("eos_token_id") for name in files]
        said.append(backend.token_to_id(special.get("eos_token", "")))
        ends: int | list[int] = next((end for end in said if end is not None), [])
        end_ids = tuple(ends) if isinstance(ends, list) else (ends,)
        return cls(backend, end_ids, special, template)

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """A token for each byte of a text in UTF-8, and one that ends a response."""
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
        """Tokens that have a text; a model's vocabulary may be padded beyond them."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_special: bool = True) -> IntArray:
        """-> [T]; add_special: with the tokens that a model puts around any text: Llama's BOS."""
        return np.array(self.backend.encode(text, add_special_tokens=add_special).ids, np.int32)

    def decode(self, ids: Sequence[int] | IntArray, *, skip_special: bool = False) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self) -> Callable[[int], str | None]:
        """A function of a text's tokens, one by one -> the text that a token makes certain, if any.

        A character that straddles tokens appears when it is whole; special tokens have no text.
        """
        return partial(decoders.DecodeStream(skip_special_tokens=True).step, self.backend)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, now: datetime | None = None) -> str:
        """Messages through the model's chat template; `now` is the date that templates may write.

        The text holds its special tokens already: encode it with add_special=False.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template; give the prompt as plain text")
        try:
            return _compiled(self.chat_template).render(
                **self.special,
                messages=messages,
                add_generation_prompt=True,
                tools=None,  # templates ask whether it is `none`, which an undefined name is not
                documents=None,
                strftime_now=(now or datetime.now()).strftime,
            )
        except TemplateError as error:
            raise ModelError(f"the chat template refused these messages: {error}") from error

    def save(self, directory: Path | str) -> None:
        """Writes tokenizer, chat template and end ids; transformers and `load` read them back."""
        directory = Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        # The class that takes tokenizer.json as it is; a model's own class may rebuild it.
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
    """Templates come with the model and are not trusted: sandboxed, with the customary helpers."""

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
