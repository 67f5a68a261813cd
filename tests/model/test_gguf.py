"""GGUF files, written here with the `gguf` package, become Hugging Face directories."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from families import make, write
from gguf import GGMLQuantizationType as Kind
from test_tokenizer import trained
from texts import TEXTS

from burnish.errors import ModelError
from burnish.model import checkpoint, gguf
from burnish.model.tokenizer import Tokenizer


def convert(directory: Path, peer: transformers.PreTrainedModel, *given, **extra) -> Path:
    path = write(directory / "tiny.gguf", peer, *given, **extra)
    gguf.convert(path, peer.config.to_dict(), directory / "made")
    return directory / "made"


@pytest.mark.parametrize("family", ["llama", "smollm2"])
def test_the_same_model(family: str, tmp_path: Path) -> None:
    peer = make(family)
    again = transformers.AutoModelForCausalLM.from_pretrained(convert(tmp_path, peer))
    for name, tensor in peer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_quantised_tensors(kind: str, tmp_path: Path) -> None:
    peer = make("smollm2", intermediate_size=64)
    state = checkpoint.load_model(convert(tmp_path, peer, Kind[kind])).exchange()
    for name, tensor in peer.state_dict().items():
        if name != "lm_head.weight":
            step = {"Q8_0": 1e-2}.get(kind, 0.12)
            torch.testing.assert_close(state[name], tensor, rtol=step, atol=step)


def test_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk__0__strange__weight": np.zeros(3, np.float32)}
    with pytest.raises(ModelError, match=r"not expected blk\.0\.strange\.weight"):
        convert(tmp_path, make("llama"), **extra)


def test_the_same_tokenizer(tmp_path: Path) -> None:
    source = trained("smollm")
    content = json.loads(source.to_str())
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    special = {token["content"] for token in content["added_tokens"]}
    fields = {
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    values = {name: SimpleNamespace(contents=lambda v=v: v) for name, v in fields.items()}
    ours = gguf._tokenizer(SimpleNamespace(fields=values))
    ours.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        want = source.encode(text).ids
        assert ours.encode(text).tolist() == again.encode(text).tolist() == want
        assert peer.encode(text) == want
    assert ours.end_ids == again.end_ids == (1,)
    assert ours.chat([{"content": "x"}]) == again.chat([{"content": "x"}]) == "<|bos|>x"
