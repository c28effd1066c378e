"""One real object store for all tests of a session, and a proxy in front of it for each test that breaks
things."""

from __future__ import annotations

import itertools
import os

import pytest

from flows.object_server import ObjectServer
from tests.s3.proxy import FaultProxy

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def object_server(tmp_path_factory):
    """A real SeaweedFS with the bucket `runs`."""
    pytest.importorskip("obstore")
    server = ObjectServer(tmp_path_factory.mktemp("seaweedfs"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def proxy(object_server):
    """Every request of a test passes here: `proxy.inject`, `proxy.counts`, `proxy.seen`."""
    with FaultProxy(("127.0.0.1", object_server.port)) as made:
        yield made


@pytest.fixture
def s3_env(object_server, monkeypatch):
    """The environment of an S3 client, set in this process: straight to the store, with nothing of this
    machine's own AWS settings. Give the returned variables to a subprocess, too."""
    return _set(monkeypatch, object_server.environment())


@pytest.fixture
def proxied_env(object_server, proxy, monkeypatch):
    """As `s3_env`, with the proxy between."""
    return _set(monkeypatch, object_server.environment(proxy.url))


@pytest.fixture
def s3_root(object_server):
    """An address below which a test has everything to itself: `s3://runs/test-7`."""
    return f"s3://{object_server.bucket}/test-{next(_NUMBERS)}"


def _set(monkeypatch, wanted):
    for name in [n for n in os.environ if n.startswith(("AWS_", "CKPT_S3_"))]:
        monkeypatch.delenv(name)
    nowhere = dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), os.devnull)
    nowhere["AWS_EC2_METADATA_DISABLED"] = "true"
    made = {**wanted, **nowhere}
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    return made
