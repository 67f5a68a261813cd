"""The ways by which weights reach an SGLang server, bucket by bucket while it is paused.

`Files` are in /dev/shm; `Handles` name memory that the server maps; a `Group` broadcasts to a
server that may be on another machine. docs/engines.md compares them.
"""

from __future__ import annotations

import base64
import io
import pickle
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing import reductions

from burnish.engine.remote import buckets
from burnish.errors import EngineError

if TYPE_CHECKING:
    from burnish.engine.sglang import Server

dist: Any = torch.distributed  # its types do not name the groups' options
SHARED = Path("/dev/shm")
"""Where files wait for a server on this machine."""
GLANCE = 0.02
"""Seconds between two looks at whether the server has come to the group."""


class Way(Protocol):
    has_begun: bool
    """Whether the server has taken a part of the weights that were sent last."""

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        """``last``: the fields of the last call, which ends the load."""

    def close(self) -> None: ...


class Files:
    """The server reads safetensors from /dev/shm."""

    def __init__(self, server: Server, told: dict[str, Any], device: str) -> None:
        """``told``: the server's /server_info; ``device``: the learner's."""
        self._server = server
        self.has_begun = False

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="burnish-sglang-", dir=SHARED))
        try:
            for number, bucket in enumerate(buckets(tensors)):
                save_file(bucket, folder / f"model-{number:05}.safetensors", {"format": "pt"})
            with self._server.paused():
                self._server.call("/update_weights_from_disk", {"model_path": str(folder)} | last)
        finally:
            shutil.rmtree(folder)

    def close(self) -> None:
        """Nothing is left to close."""


class Handles:
    """The server maps the tensors' own memory on a GPU; from a CPU their numbers are sent."""

    def __init__(self, server: Server, told: dict[str, Any], device: str) -> None:
        self._server, self._ranks = server, told["tp_size"]
        self._place = None if told["device"] == "cuda" else "cpu"
        self.has_begun = False

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        self.has_begun = False
        with self._server.paused():
            for bucket, fields in _calls(tensors, last, self._place):
                # A pickle of a view would have the whole tensor. One pickle is for one reader.
                own = [(name, t if t.is_cuda else t.clone()) for name, t in bucket.items()]
                told = {"serialized_named_tensors": [_pickled(own) for _ in range(self._ranks)]}
                self._server.call("/update_weights_from_tensor", told | fields)
                self.has_begun = True

    def close(self) -> None:
        """Nothing is left to close."""


class Group:
    """A process group of this process, rank 0, and the server's: beside torch's default one."""

    def __init__(self, server: Server, told: dict[str, Any], device: str) -> None:
        self._server, self._size = server, 1 + told["tp_size"]
        self._wait = timedelta(seconds=server.deadline)
        self._thread = ThreadPoolExecutor(1, "sglang-group")
        self._name, self._group = "", cast(Any, None)
        self._address, is_near = _seen_by(server)
        # Two ranks on one GPU can't be a group of NCCL, so a server on this machine uses gloo.
        is_gpu = told["device"] == "cuda" and device.startswith("cuda") and not is_near
        self._backend, self._place = "nccl" if is_gpu else "gloo", device if is_gpu else "cpu"
        self.has_begun = False

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        self.has_begun = False
        try:
            group = self._group = self._group or self._join()
            with self._server.paused():
                for bucket, fields in _calls(tensors, last, self._place):
                    self._broadcast(group, bucket, fields)
                    self.has_begun = True
        except RuntimeError as error:
            self._leave()
            raise self._server.error(f"is not reached by the group of weights: {error}") from error
        except EngineError:
            self._leave()
            raise

    def close(self) -> None:
        self._leave()
        self._thread.shutdown(wait=False)

    def _join(self) -> Any:
        store = dist.TCPStore(
            self._address, 0, self._size, is_master=True, wait_for_workers=False, timeout=self._wait
        )
        self._name = f"burnish-{uuid.uuid4().hex}"
        told = {"master_address": self._address, "master_port": store.port, "rank_offset": 1}
        told |= {"world_size": self._size, "group_name": self._name, "backend": self._backend}
        answer = self._thread.submit(self._server.call, "/init_weights_update_group", told)
        while not store.num_keys() and not answer.done():  # the server's first key: it has come
            wait([answer], GLANCE)
        if answer.done():
            answer.result()
        group = _group(self._backend, self._name, store, self._size, self._address, self._wait)
        answer.result()
        return group

    def _broadcast(self, group: Any, bucket: dict[str, Tensor], fields: dict[str, Any]) -> None:
        told: dict[str, Any] = {"group_name": self._name, "names": list(bucket)}
        told["dtypes"] = [str(t.dtype).removeprefix("torch.") for t in bucket.values()]
        told["shapes"] = [list(t.shape) for t in bucket.values()]
        answer = self._thread.submit(
            self._server.call, "/update_weights_from_distributed", told | fields
        )
        sent = [group.broadcast([t], dist.BroadcastOptions()) for t in bucket.values()]
        answer.result()  # before the broadcasts: a server that refuses does not take them
        for work in sent:
            work.wait(self._wait)

    def _leave(self) -> None:
        """The server's end closes first, so that nothing here waits for it."""
        if self._group is not None:
            with suppress(EngineError):
                self._server.call("/destroy_weights_update_group", {"group_name": self._name})
            self._group.abort()
            self._group = None


WAYS: dict[str, type[Files | Handles | Group]] = {
    "disk": Files,
    "tensor": Handles,
    "distributed": Group,
}
"""By the name in engine.weights."""


def _calls(
    tensors: Mapping[str, Tensor], last: dict[str, Any], place: str | None
) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Buckets with their calls' fields: the last one empties the cache and names the version."""
    end = list(tensors)[-1]
    for bucket in buckets(tensors, place):
        yield bucket, last if end in bucket else {"flush_cache": False}


class _Pickler(pickle.Pickler):
    """Writes handles to tensors on a GPU, and the numbers of others. We read no such pickles."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        build, about = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        # By its UUID, as SGLang reads it: each process counts the GPUs that it sees.
        gpu = str(torch.cuda.get_device_properties(value.device).uuid)
        return build, (*about[:6], gpu, *about[7:])


def _pickled(tensors: list[tuple[str, Tensor]]) -> str:
    file = io.BytesIO()
    _Pickler(file).dump(tensors)
    return base64.b64encode(file.getvalue()).decode()


def _seen_by(server: Server) -> tuple[str, bool]:
    """The address of this machine that the server can reach, and whether it is on this machine."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname or "", url.port or 80), server.deadline) as way:
        return way.getsockname()[0], way.getsockname()[0] == way.getpeername()[0]


def _group(backend: str, name: str, store: Any, size: int, address: str, wait: timedelta) -> Any:
    """Rank 0 of a group whose other ranks came by torch's init_process_group.

    The prefixes are torch's own for a group of this name. Nothing is told to torch.distributed, so
    that a default group of a mesh may be there or not.
    """
    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(store, 0, size, options)
    chosen = dist.ProcessGroupGloo._Options()
    chosen._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    chosen._timeout = wait
    return dist.ProcessGroupGloo(store, 0, size, chosen)
