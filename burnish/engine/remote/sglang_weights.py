"""Send weights to an SGLang server, bucket by bucket while it is paused.

`SharedFiles` writes files to /dev/shm; `MemoryHandles` sends handles of GPU memory, which the
server maps; `BroadcastGroup` also reaches a server on another machine. docs/engines.md compares
them.
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
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing import reductions

from burnish.engine.remote.client import buckets
from burnish.engine.remote.daemon_threads import DaemonThreads
from burnish.engine.remote.sglang_api import SglangApi
from burnish.errors import EngineError
from burnish.machine import folders
from burnish.machine.folders import SHARED

dist: Any = torch.distributed  # its type stubs lack the options of process groups
GRACE = 2.0
"""Seconds that this process's part of a collective operation has to end after the server's."""


class WeightSender(Protocol):
    """Sends weights to one SGLang server in one of the ways of `WEIGHT_SENDERS`."""

    has_begun: bool = False
    """Whether the server has received a part of the weights of the last `send`, or all of them.
    `SharedFiles` does not set it."""

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        """Pause the server, send all tensors, and return when it has loaded them. Calls in flight
        return their tokens so far. ``last``: further fields of the last HTTP call, which completes
        the load."""

    def close(self) -> None:
        """Release connections; only a `BroadcastGroup` has any."""


class SharedFiles(WeightSender):
    """Sends weights as safetensors files in /dev/shm, which a server on the same machine reads."""

    def __init__(self, server: SglangApi, facts: dict[str, Any]) -> None:
        """``facts``: the server's description from `SglangApi.facts`, which is not used here."""
        self._server = server
        folders.remove_dead()

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        folder = folders.claim("engine", SHARED)
        try:
            for number, bucket in enumerate(buckets(tensors)):
                file = folder.path / f"model-{number:05}.safetensors"
                save_file(bucket, file, {"format": "pt"})
            body = {"model_path": str(folder.path)} | last
            with self._server.paused():
                self._server.call("/update_weights_from_disk", body)
        finally:
            folder.remove()


class MemoryHandles(WeightSender):
    """Sends handles of GPU tensors, whose memory the server maps, and the values of CPU tensors."""

    def __init__(self, server: SglangApi, facts: dict[str, Any]) -> None:
        self._server, self._ranks = server, facts["tp_size"]
        self._place = None if facts["device"] == "cuda" else "cpu"

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        self.has_begun = False
        with self._server.paused():
            for bucket, fields in _calls(tensors, last, self._place):
                # A view's pickle would contain the whole tensor. Each rank needs its own pickle.
                own = [(name, t if t.is_cuda else t.clone()) for name, t in bucket.items()]
                body = {"serialized_named_tensors": [_pickled(own) for _ in range(self._ranks)]}
                self._server.call("/update_weights_from_tensor", body | fields)
                self.has_begun = True


class BroadcastGroup(WeightSender):
    """Broadcasts weights in a gloo process group: rank 0 is this process, and the other ranks are
    the server's. The first `send` creates the group, which is separate from torch's default group;
    an error ends it, and the next `send` creates another."""

    def __init__(self, server: SglangApi, facts: dict[str, Any]) -> None:
        self._server, self._size = server, 1 + facts["tp_size"]
        self._wait = timedelta(seconds=server.deadline)
        self._name, self._group, self._ours = "", cast(Any, None), list[Future[Any]]()

    def send(self, tensors: Mapping[str, Tensor], last: dict[str, Any]) -> None:
        self.has_begun = False
        try:
            with self._server.paused():
                self._group = self._group or self._join()
                for bucket, fields in _calls(tensors, last, "cpu"):
                    given = list(bucket.values())
                    body = {"group_name": self._name, "names": list(bucket)} | fields
                    body["dtypes"] = [str(t.dtype).removeprefix("torch.") for t in given]
                    body["shapes"] = [list(t.shape) for t in given]
                    path = "/update_weights_from_distributed"
                    self._both(path, body, _broadcast, self._group, given)
                    self.has_begun = True
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process group, if there is one. The server's side is closed first, so that
        nothing here waits for it."""
        if self._group is not None:
            with suppress(EngineError):
                self._server.call("/destroy_weights_update_group", {"group_name": self._name})
            self._group = None
        # A gloo thread that frees a tensor during interpreter shutdown would abort the process.
        wait(self._ours, GRACE)

    def _join(self) -> Any:
        url = urlsplit(self._server.url)
        place = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection(place, self._server.deadline) as way:
            address = way.getsockname()[0]  # this machine's address on the route to the server
        store = dist.TCPStore(address, 0, None, True, self._wait, wait_for_workers=False)
        self._name = f"burnish-{uuid.uuid4().hex}"
        body = {"master_address": address, "master_port": store.port, "rank_offset": 1}
        body |= {"world_size": self._size, "group_name": self._name, "backend": "gloo"}
        ours = _group, self._name, store, self._size, address, self._wait
        return self._both("/init_weights_update_group", body, *ours)

    def _both(self, path: str, body: dict[str, Any], *ours: Any) -> Any:
        """Run an HTTP call to the server and a function of this process concurrently; return the
        function's result. ``ours``: the function and its arguments.

        If the server's call fails, raise its error without waiting for the function.
        """
        threads = DaemonThreads(2)
        theirs, self._ours = threads.submit(self._server.call, path, body), [threads.submit(*ours)]
        threads.close()
        wait([theirs, *self._ours], return_when=FIRST_EXCEPTION)
        theirs.result()  # if both fail, the server's error has the reason
        return self._ours[0].result()


WEIGHT_SENDERS: dict[str, Callable[..., WeightSender]] = {
    "disk": SharedFiles,
    "tensor": MemoryHandles,
    "distributed": BroadcastGroup,
}
"""The classes that send weights, by the value of engine.weights."""


def _calls(
    tensors: Mapping[str, Tensor], last: dict[str, Any], place: str | None
) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Yield buckets of tensors, each with the further fields of its HTTP call. The last call has
    the fields ``last``; the others leave the server's cache as it is."""
    end = list(tensors)[-1]
    for bucket in buckets(tensors, place):
        yield bucket, last if end in bucket else {"flush_cache": False}


class _Pickler(pickle.Pickler):
    """Pickles GPU tensors as handles and other tensors as values. burnish never reads such
    pickles."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        build, about = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        # SGLang identifies the GPU by its UUID, because indices differ between processes.
        gpu = str(torch.cuda.get_device_properties(value.device).uuid)
        return build, (*about[:6], gpu, *about[7:])


def _pickled(tensors: list[tuple[str, Tensor]]) -> str:
    file = io.BytesIO()
    _Pickler(file).dump(tensors)
    return base64.b64encode(file.getvalue()).decode()


def _group(name: str, store: Any, size: int, address: str, wait: timedelta) -> Any:
    """Join, as rank 0, a gloo group whose other ranks call torch's init_process_group; return the
    group.

    The prefixes are torch's own for a group of this name. The group is not registered with
    torch.distributed, so it works with and without a mesh's default group.
    """
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = wait
    return dist.ProcessGroupGloo(store, 0, size, options)


def _broadcast(group: Any, tensors: list[Tensor]) -> None:
    """Broadcast all tensors from this process to the group, and wait until they are sent. The last
    one is waited for first, so that gloo has released the others."""
    for work in [group.broadcast([t], dist.BroadcastOptions()) for t in tensors][::-1]:
        work.wait()  # raises after the group's timeout
