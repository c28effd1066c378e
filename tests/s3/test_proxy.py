"""The proxy breaks what it is told to, and nothing else."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest

from tests.s3 import proxy as faults

obstore = pytest.importorskip("obstore")


@pytest.fixture
def store(object_server, proxy):
    from obstore.store import S3Store

    return S3Store(
        object_server.bucket,
        prefix=f"proxy-{proxy.port}",
        endpoint=proxy.url,
        region=object_server.region,
        access_key_id=object_server.access_key,
        secret_access_key=object_server.secret_key,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )


def test_what_no_rule_names_passes_unchanged_and_is_counted(store, proxy):
    data = os.urandom((1 << 24) + 12_345)
    obstore.put(store, "a b/ü=[1]~x", data, chunk_size=1 << 23, max_concurrency=2)
    assert bytes(obstore.get(store, "a b/ü=[1]~x").bytes()) == data
    assert bytes(obstore.get_range(store, "a b/ü=[1]~x", start=5, length=7)) == data[5:12]
    assert [e["size"] for page in obstore.list(store) for e in page] == [len(data)]
    assert obstore.head(store, "a b/ü=[1]~x")["size"] == len(data)
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "a b/ü=[1]~x", b"other", mode="create")
    obstore.delete(store, "a b/ü=[1]~x")
    assert proxy.counts() == {
        "begin": 1, "part": 3, "complete": 1, "get": 2, "list": 1, "head": 1, "put": 1, "delete": 1,
    }  # fmt: skip
    assert {r.key.partition("/")[2] for r in proxy.seen("part")} == {"a b/ü=[1]~x"}


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (faults.SLOW_DOWN, "SlowDown"),
        (faults.EXPIRED, "ExpiredToken"),
        (faults.DENIED, "AccessDenied"),
        (faults.FAIL, "InternalError"),
        (faults.RESET, "error sending request"),
        (faults.RESET_MIDWAY, "error sending request"),
    ],
)
def test_a_refused_put_is_not_carried_out_and_the_next_one_is(store, proxy, action, says):
    rule = proxy.inject(action, "put", key="a$", times=1)
    with pytest.raises(Exception, match=says):
        obstore.put(store, "a", b"x" * 100_000)
    obstore.put(store, "b", b"y")
    assert [e["path"] for page in obstore.list(store) for e in page] == ["b"]
    obstore.put(store, "a", b"x")
    assert rule.hits == 1


def test_a_put_whose_reply_is_lost_has_been_carried_out(store, proxy):
    proxy.inject(faults.LOST_REPLY, "put", times=1)
    with pytest.raises(Exception, match="error sending request"):
        obstore.put(store, "a", b"x")
    assert bytes(obstore.get(store, "a").bytes()) == b"x"


def test_answers_can_be_late_short_or_altered(store, proxy):
    data = os.urandom(300_000)
    obstore.put(store, "a", data)
    proxy.inject(faults.SLOW, "get", times=1, seconds=0.3)
    began = time.monotonic()
    assert bytes(obstore.get(store, "a").bytes()) == data
    assert time.monotonic() - began >= 0.3
    proxy.inject(faults.TRUNCATE, "get", times=1)
    with pytest.raises(Exception, match=r"end of file|body"):
        obstore.get(store, "a").bytes()
    proxy.inject(faults.FLIP_REPLY, "get", times=1)
    altered = bytes(obstore.get(store, "a").bytes())
    assert len(altered) == len(data)
    assert sum(a != b for a, b in zip(altered, data, strict=True)) == 1
    assert bytes(obstore.get(store, "a").bytes()) == data
