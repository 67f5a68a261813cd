"""Asks a real SGLang server what the client asks, and writes its answers down.

python tests/engine/record_sglang.py URL MODEL_DIRECTORY
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from burnish.engine.remote.sglang_api import SglangApi
from burnish.engine.remote.sglang_weights import BroadcastGroup, MemoryHandles

CONTRACT = Path(__file__).with_name("sglang_contract.json")
FACTS = (
    "version",
    "max_req_input_len",
    "skip_tokenizer_init",
    "enable_deterministic_inference",
    "weight_version",
    "dtype",
    "device",
    "tp_size",
    "pp_size",
    "dp_size",
    "enable_memory_saver",
    "enable_weights_cpu_backup",
)
"""The part of /server_info that is kept."""
DRAWN = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop_token_ids": [2], "sampling_seed": 5}
ASKED = {"rid": "a1", "input_ids": [5, 6, 7, 8], "return_logprob": True}


def generate(params: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", ASKED | more | {"sampling_params": params}


EXCHANGES: list[tuple[str, dict[str, Any] | None]] = [
    ("/pause_generation", {"mode": "abort"}),
    ("/update_weights_from_disk", {"model_path": "MODEL", "weight_version": "6"}),
    ("/continue_generation", {}),
    ("/server_info", None),
    generate(DRAWN | {"max_new_tokens": 4}),
    generate({"max_new_tokens": 80, "stop_token_ids": list(range(0, 260, 2)), "sampling_seed": 5}),
    generate({"max_new_tokens": 1, "temperature": 1.0}, token_ids_logprob=[5, 6], extra_key="0"),
    generate(DRAWN | {"max_new_tokens": 4, "top_p": 0}),
    generate(DRAWN | {"max_new_tokens": 4}, input_ids=["a"]),
    generate(DRAWN | {"max_new_tokens": 4}, input_ids=[5] * 200),
    ("/pause_generation", {"mode": "abort"}),
    ("/update_weights_from_disk", {"model_path": "MODEL", "weight_version": "7"}),
    ("/continue_generation", {}),
    generate(DRAWN | {"max_new_tokens": 4}),
    ("/update_weights_from_disk", {"model_path": "/nowhere", "flush_cache": False}),
    ("/pause_generation", {"mode": "soon"}),
    ("/abort_request", {"rid": "a1"}),
    ("/abort_request", {"abort_all": True}),
    ("/destroy_weights_update_group", {"group_name": "nobody's"}),
    ("/flush_cache?timeout=9", {}),
    ("/release_memory_occupation", {"tags": ["kv_cache"]}),
    ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
]
"""Paths with their bodies, in this order; None is a GET."""


def ask(url: str, path: str, body: dict[str, Any] | None, model: Path) -> tuple[int, Any]:
    """-> the answer's status, and its JSON or text."""
    text = None if body is None else json.dumps(body).replace('"MODEL"', json.dumps(str(model)))
    data = None if text is None else text.encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, said = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read()
    told = json.loads(said) if said.startswith(b"{") else said.decode()
    if path == "/server_info":
        told = {name: told[name] for name in FACTS}
    if "message" in told:
        told["message"] = told["message"].partition("\n")[0]
    return status, told


def send(url: str) -> list[dict[str, Any]]:
    """The calls of the client's own ways without files, with the names of their fields."""
    rows: list[dict[str, Any]] = []

    class Noting(SglangApi):
        def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
            told = super().call(path, body)
            rows.append({"path": path, "fields": sorted(body or {}), "answer": told})
            return told

    facts = SglangApi(url, 60.0).call("/server_info")
    for kind in (MemoryHandles, BroadcastGroup):
        way = kind(Noting(url, 60.0), facts)
        way.send({"model.norm.weight": torch.ones(32)}, {"weight_version": "8"})
        way.close()
    return rows


def main(url: str, model: str) -> None:
    rows = []
    for path, body in EXCHANGES:
        status, told = ask(url, path, body, Path(model).absolute())
        rows.append({"path": path, "body": body, "status": status, "answer": told})
    rows += send(url)
    CONTRACT.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
