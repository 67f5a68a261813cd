"""Text to ids and back: the only place where that happens."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from burnish.errors import ModelError
from burnish.types import IntArray

if TYPE_CHECKING:
    from burnish.model.gguf import Gguf


class Tokenizer:
    """A `tokenizers` pipeline with what a model directory says about chat and about the end."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        end_ids: Iterable[int] = (),
        special: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """special: token strings by role, such as {"bos_token": "<s>"}, for templates."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.end_ids = tuple(end_ids)
        """Each of these ends a response."""
        self.special = dict(special or {})
        self.chat_template = chat_template
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From a model directory with a tokenizer.json, or from a GGUF file."""
        path = Path(path)
        if path.suffix == ".gguf":
            from burnish.model.gguf import Gguf

            return _from_gguf(Gguf(path))
        return _from_directory(path)

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text; a model's vocabulary may be padded beyond them."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, add_special: bool = True) -> IntArray:
        """-> [T]; add_special: with what the model puts around any text, such as Llama's BOS."""
        return np.array(self._backend.encode(text, add_special_tokens=add_special).ids, np.int32)

    def decode(self, ids: Sequence[int] | IntArray, *, skip_special: bool = False) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = False) -> Detokenizer:
        return Detokenizer(self, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a byte-level token; ids that have no text have none."""
        if token not in self._bytes:
            text = self._backend.id_to_token(token) or ""
            in_alphabet = all(char in BYTE_OF for char in text)  # an added token may not be
            self._bytes[token] = (
                bytes(BYTE_OF[char] for char in text) if in_alphabet else text.encode()
            )
        return self._bytes[token]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder().items()
        return frozenset(token for token, content in added if content.special)

    @cached_property
    def is_byte_level(self) -> bool:
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """Messages through the model's chat template; `now` is the date that templates may write.

        The text holds its special tokens already: encode it with add_special=False.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template; give the prompt as plain text")
        # Templates ask whether tools are `none`, which what is not defined at all is not.
        given: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self.special,
            "messages": messages,
        }
        given |= {"add_generation_prompt": add_generation_prompt, **variables}
        try:
            template = _compiled(self.chat_template)
            return template.render(given, strftime_now=(now or datetime.now()).strftime)
        except TemplateError as error:
            raise ModelError(f"the chat template refused these messages: {error}") from error

    def save(self, directory: Path | str) -> None:
        """What transformers and `load` read back: tokenizer, chat template and end ids."""
        directory = Path(directory)
        self._backend.save(str(directory / "tokenizer.json"))
        # The class that takes tokenizer.json as it is; a model's own class may rebuild it.
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        _write_json(directory / "tokenizer_config.json", settings)
        roles = [role for role in ("bos_token", "pad_token") if role in self.special]
        ids = {f"{role}_id": self._backend.token_to_id(self.special[role]) for role in roles}
        generation = ids | ({"eos_token_id": list(self.end_ids)} if self.end_ids else {})
        _write_json(directory / "generation_config.json", generation)


class Detokenizer:
    """Text of tokens as they come: a character that straddles tokens appears when it is whole."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""
        """All that is certain so far."""

    def push(self, *tokens: int) -> str:
        """-> the text that these tokens make certain, often none."""
        if self._skip_special:
            special = self._tokenizer.special_ids
            tokens = tuple(token for token in tokens if token not in special)
        if self._tokenizer.is_byte_level:
            found = b"".join(map(self._tokenizer.token_bytes, tokens))
            return self._append(self._utf8.decode(found))
        # Other decoders look at neighbours (a leading space, byte fallback): decode all again.
        self._ids += tokens
        return self._append(self._whole().rstrip("\ufffd")[len(self.text) :])

    def flush(self) -> str:
        """-> what is left when no token follows: a character cut short becomes U+FFFD."""
        if self._tokenizer.is_byte_level:
            return self._append(self._utf8.decode(b"", final=True))
        return self._append(self._whole()[len(self.text) :])

    def _append(self, fresh: str) -> str:
        self.text += fresh
        return fresh

    def _whole(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special=self._skip_special)


def _bytes_of_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest for 256, 257, …"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTE_OF = _bytes_of_alphabet()


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


def _from_directory(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"{file} is missing; burnish reads tokenizers in that form only")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file} can't be read: {error}") from error
    settings = _read_json(directory / "tokenizer_config.json")
    special = {
        role: value["content"] if isinstance(value, dict) else value
        for role, value in settings.items()
        if role.endswith("_token") and isinstance(value, str | dict)
    }
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (directory / "chat_template.jinja").exists():
        template = (directory / "chat_template.jinja").read_text()
    said = (_read_json(directory / name) for name in ("generation_config.json", "config.json"))
    ends = [given["eos_token_id"] for given in said if given.get("eos_token_id") is not None]
    ends.append(backend.token_to_id(special.get("eos_token", "")))
    end_ids = ends[0] if isinstance(ends[0], list) else [end for end in ends[:1] if end is not None]
    return Tokenizer(backend, end_ids=end_ids, special=special, chat_template=template)


def _split(numbers: str) -> pre_tokenizers.PreTokenizer:
    """Llama 3's pattern and Qwen2's, which differ in how many digits stay together."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    spaces = r"\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(f"{contractions}|{words}|{spaces}"), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, plain])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
QWEN2 = _split(r"\p{N}")
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
"""By the name that a GGUF gives to how text is split before merging."""
CONTROL, USER_DEFINED = 3, 4


def _from_gguf(gguf: Gguf) -> Tokenizer:
    def setting(key: str, default: Any = None) -> Any:
        return gguf.get(f"tokenizer.ggml.{key}", default)

    kind, pre = setting("model"), setting("pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{gguf.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} can't be rebuilt; burnish "
            f"reads 'gpt2' with {', '.join(PRE_TOKENIZERS)}; use the model's own directory instead"
        )
    tokens: list[str] = setting("tokens", [])
    merges = [tuple(merge.split(" ")) for merge in setting("merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    if "qwen" in pre:
        backend.normalizer = normalizers.NFC()
    for token, what in zip(tokens, setting("token_type", []), strict=False):
        if what in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=what == CONTROL, normalized=False)])
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {role: setting(f"{name}_token_id") for name, role in roles.items()}
    special = {f"{role}_token": tokens[i] for role, i in found.items() if i is not None}
    if setting("add_bos_token", pre == "llama-bpe"):
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    ends = dict.fromkeys(setting(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    return Tokenizer(
        backend,
        end_ids=[end for end in ends if end is not None],
        special=special,
        chat_template=gguf.get("tokenizer.chat_template"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
