"""Control tokens, and how texts that are not trusted are kept from containing them.

A chat template writes control tokens such as <|im_end|>, which separate the messages of a
conversation. A user, a document or a tool can write the same characters. They are not control
tokens there: they are tokens of the text, like any others.

``mask`` replaces the names of control tokens in a text by numbers before a template is rendered.
``encode`` encodes a rendered text as a whole: names are control tokens, and masks become the text
that they stand for. For this it uses a second tokenizer, in which the control tokens have other
names. All other texts are encoded exactly as by the model's own tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import tokenizers

from burnish.errors import ModelError

AnyValue = TypeVar("AnyValue")


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, its end tokens, and others with a role
    such as BOS."""

    def __init__(
        self, backend: tokenizers.Tokenizer, end_ids: Iterable[int], names: Iterable[str]
    ) -> None:
        """``names`` are further control tokens. Tokens that the tokenizer does not add to its
        model's vocabulary are ignored: no text is encoded as one of them because of its name."""
        self._backend, also = backend, {*end_ids, *map(backend.token_to_id, names)}
        added = backend.get_added_tokens_decoder()
        found = {token.content: i for i, token in added.items() if token.special or i in also}
        self._ids = {name: found[name] for name in sorted(found, key=len, reverse=True)}
        # Nobody can guess it, so no text contains a mask or a new name. No id depends on it.
        self._key = f"{secrets.randbelow(10**24):024}"
        self._masks = {name: f"{self._key}{number:05}" for number, name in enumerate(self._ids)}
        self._unmasked = {mask: name for name, mask in self._masks.items()}
        named = "|".join(map(re.escape, self._ids))
        self._name = re.compile(named or r"(?!)")
        self._mask = re.compile(rf"{self._key}\d{{5}}")
        self._either = re.compile(f"{self._mask.pattern}|{self._name.pattern}")

    def mask(self, value: AnyValue) -> AnyValue:
        """Return a text with the names of control tokens masked, or an object of JSON with all of
        its texts masked."""
        if isinstance(value, str):
            return self._name.sub(lambda found: self._masks[found[0]], value)  # type: ignore[return-value]
        if isinstance(value, Mapping):
            return {self.mask(key): self.mask(item) for key, item in value.items()}  # type: ignore[return-value]
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in value]  # type: ignore[return-value]
        return value

    def unmask(self, text: str) -> str:
        """Return a text with the names that the masks stand for."""
        return self._mask.sub(lambda found: self._unmasked[found[0]], text)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of a text, in which masks are plain text and names are control tokens."""
        if self._key not in text:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        text = self._either.sub(lambda found: self._renamed(found[0]), text)
        return self._other.encode(text, add_special_tokens=add_special).ids

    def _renamed(self, found: str) -> str:
        return self._unmasked.get(found) or self._name_of(found)

    def _name_of(self, name: str) -> str:
        return f"\ue000{self._masks[name]}\ue001"

    @cached_property
    def _other(self) -> tokenizers.Tokenizer:
        """The tokenizer with other names of the control tokens."""
        new = {name: self._name_of(name) for name in self._ids}
        pipeline = json.loads(self._backend.to_str())
        for token in pipeline["added_tokens"]:
            token["content"] = new.get(token["content"], token["content"])
        _rename(pipeline["model"], new)
        other = tokenizers.Tokenizer.from_str(json.dumps(pipeline))
        if wrong := [name for name, i in self._ids.items() if other.token_to_id(new[name]) != i]:
            raise ModelError(
                f"a text contains special tokens of the model ({wrong[0]}), and burnish can't "
                "encode them as plain text with this tokenizer; remove them from the text"
            )
        return other


def _rename(model: dict[str, Any], new: Mapping[str, str]) -> None:
    """Rename tokens of a tokenizer's model, the "model" of its JSON, and remove merges that make
    one of them."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {new.get(token, token): i for token, i in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pairs of a token and its score
        model["vocab"] = [[new.get(token, token), score] for token, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = new.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if new.keys().isdisjoint([*pair, "".join(pair)])]
