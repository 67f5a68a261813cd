"""GGUF files, written here with the `gguf` package and read by transformers and by burnish."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from families import make, write
from gguf import GGMLQuantizationType as Kind

from burnish.errors import ModelError
from burnish.model import checkpoint
from burnish.model.attention import causal
from burnish.model.gguf import Gguf
from burnish.model.rope import Llama3, Rope, frequencies

TOKENS = torch.randint(96, (40,), generator=torch.Generator().manual_seed(0))
ARCH = {"llama": "llama", "smollm2": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    model = checkpoint.load(path)
    return model.logits(model(TOKENS, torch.arange(40), causal([40])))


@pytest.mark.parametrize("family", ARCH)
def test_same_logits_as_the_model_and_as_transformers(family: str, tmp_path: Path) -> None:
    # transformers reads no head width from a Qwen3 GGUF, and takes it to be 128.
    peer = make(family, **({"head_dim": 128} if family == "qwen3" else {}))
    path = write(tmp_path / "tiny.gguf", peer, ARCH[family])
    with torch.no_grad():
        torch.testing.assert_close(logits(path), peer(TOKENS[None]).logits[0], rtol=0, atol=1e-5)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
        torch.testing.assert_close(logits(path), again(TOKENS[None]).logits[0], rtol=0, atol=1e-5)


QUANTISED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_tensors(kind: str, tmp_path: Path) -> None:
    peer = make("smollm2", intermediate_size=64)
    path = write(tmp_path / "tiny.gguf", peer, "llama", Kind[kind])
    state = checkpoint.hf_state(checkpoint.load(path))
    for name, tensor in peer.state_dict().items():
        if name != "lm_head.weight":
            step = {"F16": 2e-3, "BF16": 1e-2, "Q8_0": 1e-2}.get(kind, 0.12)
            torch.testing.assert_close(state[name], tensor, rtol=step, atol=step)


def test_every_type_that_gguf_dequantises_is_read(tmp_path: Path) -> None:
    """Also those that gguf cannot write from floats: the blocks are zeros."""
    from gguf.quants import _type_traits

    for kind, trait in _type_traits.items():
        writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
        writer.add_tensor(
            "output_norm.weight", np.zeros((2, trait.type_size), np.uint8), raw_dtype=kind
        )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        config = checkpoint.ModelConfig(vocab_size=2)
        state = Gguf(tmp_path / "one.gguf").state(config, lambda done, total: None)
        assert state["model.norm.weight"].shape == (2, trait.block_size), kind.name
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("output_norm.weight", np.zeros(4, np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"output_norm\.weight is I32"):
        Gguf(tmp_path / "one.gguf").state(config, lambda done, total: None)


def test_llama3_stretching_is_found_again(tmp_path: Path) -> None:
    """A GGUF keeps it as one divisor per frequency (here for heads of 8 dimensions)."""
    rope = Rope(500000.0, Llama3(32.0, 1.0, 4.0, 8192))
    cpu = torch.device("cpu")
    divisors = frequencies(Rope(500000.0), 8, cpu) / frequencies(rope, 8, cpu)
    peer = make("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    path = write(tmp_path / "a.gguf", peer, "llama", rope_freqs__weight=divisors.numpy())
    assert Gguf(path).config().rope == rope
    checkpoint.load(path)
    path = write(tmp_path / "b.gguf", peer, "llama", rope_freqs__weight=divisors.numpy() * 1.5)
    with pytest.raises(ModelError, match="does not follow Llama 3's rule"):
        checkpoint.load(path)


def test_other_stretching_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", make("llama"), "llama", scaling="yarn")
    with pytest.raises(ModelError, match="got 'yarn'"):
        checkpoint.load(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", make("llama"), "gemma3")
    with pytest.raises(ModelError, match="'gemma3' is not supported"):
        checkpoint.load(path)


def test_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk__0__strange__weight": np.zeros(3, np.float32)}
    path = write(tmp_path / "tiny.gguf", make("llama"), "llama", **extra)
    with pytest.raises(ModelError, match=r"not part of this model: blk\.0\.strange\.weight"):
        checkpoint.load(path)
