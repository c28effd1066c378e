"""What an object store does wrong, and that no save, launch or reader takes it for something else."""

import time

import pytest

from ckpt.errors import StorageError
from ckpt.run import open_run
from ckpt.store import open_store
from ckpt.stores import client
from ckpt.writer.retry import TRANSIENT, errno_of
from tests.s3 import proxy as faults

PASSING = [
    faults.SLOW_DOWN,
    faults.FAIL,
    faults.RESET,
    faults.RESET_MIDWAY,
    faults.LOST_REPLY,
    faults.TRUNCATE,
]


@pytest.fixture
def store(proxied_env, s3_root, monkeypatch):
    monkeypatch.setenv("CKPT_S3_DEADLINE_S", "4")
    return open_store(f"{s3_root}/run")


@pytest.mark.parametrize("action", PASSING)
def test_what_passes_by_itself_is_tried_again(store, proxy, action):
    rule = proxy.inject(action, key="k$", times=2)
    store.put("k", b"x" * 100)
    rule.hits = 0
    assert store.read("k") == b"x" * 100
    rule.hits = 0
    assert store.size("k") == 100
    lists = proxy.inject(action, kind="list", times=2)
    assert store.list() == [("k", False, 100)]
    rule.hits = 0
    store.delete("k")
    assert rule.hits == lists.hits == 2 or action in (faults.TRUNCATE, faults.RESET_MIDWAY)
    assert store.list() == []


def test_a_server_that_never_recovers_is_given_up_at_the_deadline(store, proxy, monkeypatch):
    monkeypatch.setenv("CKPT_S3_DEADLINE_S", "1.5")
    store = open_store(store.uri)
    store.put("k", b"1")
    proxy.inject(faults.SLOW_DOWN)
    began = time.monotonic()
    with pytest.raises(StorageError, match="SlowDown") as caught:
        store.read("k")
    assert 1.4 < time.monotonic() - began < 5
    assert errno_of(caught.value) in TRANSIENT
    # Full jitter and growing pauses: neither a storm nor a standstill.
    assert 3 < len(proxy.seen("get", "k$")) < 40


@pytest.mark.parametrize("action", [faults.LOST_REPLY, faults.RESET, faults.SLOW_DOWN])
def test_a_create_whose_first_answer_is_lost_still_knows_who_made_it(store, proxy, action):
    rule = proxy.inject(action, kind="put", key="k$", times=1)
    assert store.create("k", b"mine")
    rule.hits = 0
    assert not store.create("k", b"another's")
    assert store.read("k") == b"mine"


def test_an_upload_that_was_changed_on_its_way_is_not_taken_for_done(store, proxy):
    proxy.inject(faults.FLIP_REQUEST, kind="put", key="[kc]$", times=1)
    store.put("k", b"what was meant")
    assert store.read("k") == b"what was meant"
    proxy.inject(faults.FLIP_REQUEST, kind="put", key="c$", times=1)
    assert store.create("c", b"what was meant")
    assert store.read("c") == b"what was meant"


def test_expired_keys_are_renewed_within_the_request(store, proxy):
    proxy.inject(faults.EXPIRED, key="k$", times=1)
    store.put("k", b"1")
    proxy.inject(faults.EXPIRED, kind="get", key="k$", times=2)
    assert store.read("k") == b"1"


def test_keys_that_stay_expired_are_one_clear_error_at_once(proxied_env, proxy, s3_root, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_CONTACT_S", 1)
    proxy.inject(faults.EXPIRED)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"have expired.*renew them"):
        open_run(f"{s3_root}/run")
    assert time.monotonic() - began < 5


def test_denied_is_said_with_bucket_and_endpoint_and_not_tried_again(store, proxy):
    proxy.inject(faults.DENIED)
    with pytest.raises(StorageError, match=f"{proxy.url} refuses .* in bucket runs .*policy"):
        store.read("k")
    assert len(proxy.requests) == 1


def test_a_server_that_hangs_is_given_up_soon_when_a_run_is_opened(proxied_env, proxy, s3_root, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(client, "_FIRST_CONTACT_S", 1)
    monkeypatch.setenv("CKPT_S3_DEADLINE_S", "99")
    proxy.inject(faults.HANG)
    began = time.monotonic()
    with pytest.raises(StorageError, match="doesn't answer in time"):
        open_run(f"{s3_root}/run")
    assert time.monotonic() - began < 5


def test_a_cut_listing_is_never_taken_for_a_short_one(store, proxy):
    for n in range(30):
        store.put(f"{n:03d}", b"")
    proxy.inject(faults.TRUNCATE, kind="list", times=1)
    assert len(store.list()) == 30
