"""The suite itself cannot reach another machine, so no test can pass thanks to a download."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request

import pytest


def test_connections_and_look_ups_outside_the_machine_are_refused() -> None:
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(OSError, match="no network"):
        socket.socket().connect_ex(("192.0.2.1", 80))
    with pytest.raises(OSError, match="no network"):
        socket.getaddrinfo("example.org", 443)
    with pytest.raises(urllib.error.URLError, match="no network"):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open("http://example.org", timeout=1)


def test_loopback_still_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=5)
        peer, _ = server.accept()
        peer.sendall(b"hello")
        assert client.recv(5) == b"hello"
        client.close()
        peer.close()


def test_the_hub_is_off() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
