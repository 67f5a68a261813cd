"""The ways by which weights reach an SGLang server, bucket by bucket while it is paused.

`Files` are in /dev/shm; `Handles` name memory that the server maps; a `Group` broadcasts to a
server that may be on another machine. docs/engines.md compares them.
"""

from __future__ import annotations

import base64
import io
import pickle
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing import reductions

from burnish import folders
from burnish.engine.callers import Callers
from burnish.engine.remote import buckets
from burnish.errors import EngineError
from burnish.folders import SHARED

if TYPE_CHECKING:
    from burnish.engine.sglang import Server

dist: Any = torch.distributed  # its types do not name the groups' options
GRACE = 2.0
"""Seconds for our part of a group's work to end, once the server's has."""


class Way(Protocol):
    has_begun: bool = False
    """Whether the server has taken a part of the weights that were sent last."""

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        """``last``: the fields of the last call, which ends the load."""

    def close(self) -> None:
        """Only a group has something to close."""


class Files(Way):
    """The server reads safetensors from /dev/shm."""

    def __init__(self, server: Server, told: dict[str, Any]) -> None:
        """``told``: the server's /server_info."""
        self._server = server
        folders.remove_dead()

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        folder = folders.claim("engine", SHARED)
        try:
            for number, bucket in enumerate(buckets(tensors)):
                file = folder.path / f"model-{number:05}.safetensors"
                save_file(bucket, file, {"format": "pt"})
            told = {"model_path": str(folder.path)} | last
            with self._server.paused():
                self._server.call("/update_weights_from_disk", told)
        finally:
            folder.remove()


class Handles(Way):
    """The server maps the tensors' own memory on a GPU; from a CPU their numbers are sent."""

    def __init__(self, server: Server, told: dict[str, Any]) -> None:
        self._server, self._ranks = server, told["tp_size"]
        self._place = None if told["device"] == "cuda" else "cpu"

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        self.has_begun = False
        with self._server.paused():
            for bucket, fields in _calls(tensors, last, self._place):
                # A pickle of a view would have the whole tensor. One pickle is for one reader.
                own = [(name, t if t.is_cuda else t.clone()) for name, t in bucket.items()]
                told = {"serialized_named_tensors": [_pickled(own) for _ in range(self._ranks)]}
                self._server.call("/update_weights_from_tensor", told | fields)
                self.has_begun = True


class Group(Way):
    """A process group of this process, rank 0, and the server's: beside torch's default one."""

    def __init__(self, server: Server, told: dict[str, Any]) -> None:
        self._server, self._size = server, 1 + told["tp_size"]
        self._wait = timedelta(seconds=server.deadline)
        self._name, self._group, self._ours = "", cast(Any, None), list[Future[Any]]()

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        self.has_begun = False
        try:
            with self._server.paused():
                self._group = self._group or self._join()
                for bucket, fields in _calls(tensors, last, "cpu"):
                    given = list(bucket.values())
                    told = {"group_name": self._name, "names": list(bucket)} | fields
                    told["dtypes"] = [str(t.dtype).removeprefix("torch.") for t in given]
                    told["shapes"] = [list(t.shape) for t in given]
                    path = "/update_weights_from_distributed"
                    self._both(path, told, _broadcast, self._group, given)
                    self.has_begun = True
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The server's end closes first, so that nothing here waits for it."""
        if self._group is not None:
            with suppress(EngineError):
                self._server.call("/destroy_weights_update_group", {"group_name": self._name})
            self._group = None
        # A thread of gloo that drops a tensor while the interpreter ends aborts the process.
        wait(self._ours, GRACE)

    def _join(self) -> Any:
        url = urlsplit(self._server.url)
        place = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection(place, self._server.deadline) as way:
            address = way.getsockname()[0]  # of this machine, as the server can reach it
        store = dist.TCPStore(address, 0, None, True, self._wait, wait_for_workers=False)
        self._name = f"burnish-{uuid.uuid4().hex}"
        told = {"master_address": address, "master_port": store.port, "rank_offset": 1}
        told |= {"world_size": self._size, "group_name": self._name, "backend": "gloo"}
        ours = _group, self._name, store, self._size, address, self._wait
        return self._both("/init_weights_update_group", told, *ours)

    def _both(self, path: str, told: dict[str, Any], *ours: Any) -> Any:
        """The server's part and ours at once. A server that fails is not waited for."""
        callers = Callers(2)
        theirs, self._ours = callers.submit(self._server.call, path, told), [callers.submit(*ours)]
        callers.close()
        wait([theirs, *self._ours], return_when=FIRST_EXCEPTION)
        theirs.result()  # if both fail, the server says why
        return self._ours[0].result()


WAYS: dict[str, Callable[..., Way]] = {"disk": Files, "tensor": Handles, "distributed": Group}
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


def _group(name: str, store: Any, size: int, address: str, wait: timedelta) -> Any:
    """Rank 0 of a group whose other ranks came by torch's init_process_group.

    The prefixes are torch's own for a group of this name. Nothing is told to torch.distributed, so
    that a default group of a mesh may be there or not.
    """
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = wait
    return dist.ProcessGroupGloo(store, 0, size, options)


def _broadcast(group: Any, tensors: list[Tensor]) -> None:
    """The last one first: it ends last, and gloo has then let the others go."""
    for work in [group.broadcast([t], dist.BroadcastOptions()) for t in tensors][::-1]:
        work.wait()  # as long as the group's deadline
