"""The server of agents as the training process sees it: nothing that it sends can block the run."""

import os
from contextlib import closing
from multiprocessing import Pipe

import pytest

from burnish.machine.process import ChildProcess
from burnish.rollout import agent_server
from burnish.rollout.agent_server import AgentServer

REQUEST = b"\0\0\0\x0b" + b'{"call": 1}'


@pytest.fixture
def server():
    with closing(AgentServer("policy", 77)) as server:
        server._process = ChildProcess(["true"], name="the server of agents")
        ours, theirs = Pipe()
        server._open(ours)
        with closing(theirs):
            yield server, theirs


def test_requests_arrive_in_parts(server):
    server, theirs = server
    for part in (REQUEST[:2], REQUEST[2:9], REQUEST[9:] + REQUEST[:5]):
        assert server.receive() == []
        os.write(theirs.fileno(), part)
    assert server.receive() == [{"call": 1}]
    assert server.receive() == []


def test_many_requests_arrive_at_once(server):
    server, theirs = server
    os.write(theirs.fileno(), REQUEST * 100)
    assert server.receive() == [{"call": 1}] * 100
    theirs.send_bytes(REQUEST[4:])
    assert server.receive() == [{"call": 1}]


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_half_a_request_does_not_block(server, end, monkeypatch):
    server, theirs = server
    os.write(theirs.fileno(), REQUEST[:-3])
    assert server.receive() == []
    if end == "killed":
        theirs.close()
    else:
        monkeypatch.setattr(agent_server, "SEND_SECONDS", 0.0)
    assert server.receive() is None
    assert server.readable == []
