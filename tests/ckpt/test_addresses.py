from pathlib import Path

import pytest

from ckpt.errors import StorageError
from ckpt.names import attempt_name, join, split_checkpoint
from ckpt.stores.addresses import Bucket, Folder, Remote, name_of, parent_of, parse


@pytest.mark.parametrize(
    ("uri", "canonical"),
    [
        ("s3://bkt", "s3://bkt"),
        ("s3://bkt/", "s3://bkt"),
        ("s3://bkt/p", "s3://bkt/p"),
        ("s3://bkt//p", "s3://bkt/p"),
        ("s3://bkt/p/q//", "s3://bkt/p/q"),
        ("s3://bkt/a b/ünï/~x/100%/e=3", "s3://bkt/a b/ünï/~x/100%/e=3"),
        ("gs://bkt/p/", "gs://bkt/p"),
        ("abfs://box//p", "abfs://box/p"),
        ("memory:///p/q/", "memory://p/q"),
    ],
)
def test_addresses_that_mean_the_same_place_have_one_canonical_form(uri, canonical):
    place = parse(uri)
    assert isinstance(place, Bucket | Remote) and place.uri == canonical
    assert parse(place.uri) == place


def test_folders_are_taken_in_every_usual_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for uri in ("p", "./p", "~/p", f"{tmp_path}/p", f"file://{tmp_path}/p", Path("p")):
        assert parse(uri) == Folder(tmp_path / "p")
    for name in ("s3", "s3/b", "./s3:b", "a:b", "2026-12-01T10:00"):
        assert isinstance(parse(name), Folder)


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("s3:/bkt/p", "was s3://bkt/p meant"),
        ("s3:bkt/p", "was s3://bkt/p meant"),
        ("S3://bkt/p", "was s3://bkt/p meant"),
        ("s3a://bkt/p", "was s3://bkt/p meant"),
        (" s3://bkt/p", "was s3://bkt/p meant"),
        ("s3//bkt/p", "was s3://bkt/p meant"),
        ("s3:\\bkt", "was s3://bkt meant"),
        ("s3;//bkt", "was s3://bkt meant"),
        (Path("s3://bkt/p"), "was s3://bkt/p meant"),
        ("s3:///bkt/p", "no bucket: was s3://bkt/p meant"),
        ("s3:////bkt/p", "no bucket: was s3://bkt/p meant"),
        ("s3://", "names no bucket"),
        ("s3:///", "names no bucket"),
        ("s3://Bucket/p", "was s3://bucket/p meant"),
        ("s3://b", "3 to 63"),
        ("s3://bkt?x=1/p", "can't be a bucket"),
        ("s3://my bkt/p", "can't be a bucket"),
        ("s3://bkt/a/../p", "no '.' or '..'"),
        ("s3://bkt/./p", "no '.' or '..'"),
        ("s3://bkt/p ", "a space"),
        ("s3://bkt/p\n", "control characters"),
        ("s3://bkt/" + "x" * 900, "800 are taken"),
        ("http://host/bkt", "AWS_ENDPOINT_URL"),
        ("https://host/bkt", "AWS_ENDPOINT_URL"),
        ("GS://bkt/p", "was gs://bkt/p meant"),
        ("gs:/bkt/p", "was gs://bkt/p meant"),
        ("gcs://bkt/p", "was gs://bkt/p meant"),
        ("az://box/p", "was abfs://box/p meant"),
        ("gss://bkt/p", "was gs://bkt/p meant"),
        ("nonsense://bkt/p", "not supported"),
        ("zip://bkt/p", "not supported"),
        ("simplecache::s3://bkt/p", "is no address"),
        ("gs://", "names no bucket"),
    ],
)
def test_what_is_mistyped_is_refused_naming_what_was_probably_meant(uri, advice):
    with pytest.raises(StorageError, match=advice):
        parse(uri)


@pytest.mark.parametrize(
    "uri", ["s3://AKIAKEY:hush@bkt/p", "s3:/AKIAKEY:hush@bkt/p", "S3://AKIAKEY:hush@bkt", "gs://k:hush@bkt/p"]
)
def test_keys_in_an_address_are_refused_and_never_repeated(uri):
    with pytest.raises(StorageError) as caught:
        parse(uri)
    assert "@" in str(caught.value) and "hush" not in str(caught.value) and "AKIAKEY" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "parent", "name"),
    [
        ("s3://bkt/p/run", "s3://bkt/p", "run"),
        ("s3://bkt/run", "s3://bkt", "run"),
        ("s3://bkt", None, "bkt"),
        ("/a/run", "/a", "run"),
        ("/run", "/", "run"),
        ("/", None, ""),
    ],
)
def test_a_place_knows_what_it_lies_in(uri, parent, name):
    assert parent_of(uri) == parent and name_of(uri) == name
    assert parent is None or join(parent, name) == uri


def test_a_checkpoint_s_address_is_split_into_run_and_attempt():
    attempt = attempt_name(50, 1)
    assert split_checkpoint(f"s3://bkt/run/{attempt}") == ("s3://bkt/run", attempt)
    assert split_checkpoint(f"s3://bkt/{attempt}") == ("s3://bkt", attempt)
    assert split_checkpoint(f"s3://{attempt}") is None
    assert split_checkpoint(f"/{attempt}") == ("/", attempt)
    assert split_checkpoint("s3://bkt/run") is None
