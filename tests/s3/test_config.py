"""Settings of an object store reach every process by the environment, and bad ones are refused before
anything is made."""

from __future__ import annotations

import json
import os

import pytest

from ckpt.errors import StorageError
from flows import commands, storage
from flows.config import load
from flows.overrides import ConfigError

HERE = ("storage=s3", "storage.root=s3://bucket/runs")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("AWS_", "CKPT_S3_"))]:
        monkeypatch.delenv(name)
    yield
    storage.root_of({"root": "/"})
    assert storage.assignments() == []


def root_of(*overrides):
    return storage.root_of(load("train", list(overrides)).values["storage"])


def test_what_the_config_says_is_set_and_what_it_leaves_open_is_yours(monkeypatch, tmp_path):
    bundle = tmp_path / "ca.pem"
    bundle.write_text("-")
    mine = {"AWS_REGION": "eu-1", "AWS_ENDPOINT_URL": "http://mine:1", "AWS_ENDPOINT_URL_S3": "http://mine:2"}
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    root = root_of(
        *HERE, "storage.s3.endpoint=https://fb:9000", "storage.s3.part_mib=32", "storage.s3.ca_bundle=ca.pem"
    )
    assert root == "s3://bucket/runs"
    assert os.environ["AWS_ENDPOINT_URL"] == "https://fb:9000"
    assert "AWS_ENDPOINT_URL_S3" not in os.environ
    assert os.environ["CKPT_S3_PART_MIB"] == "32"
    assert os.environ["AWS_CA_BUNDLE"] == str(bundle)
    assert os.environ["AWS_REGION"] == "eu-1"
    assert commands.ckpt("ls", root) == (
        f"AWS_ENDPOINT_URL=https://fb:9000 AWS_CA_BUNDLE={bundle} python -m ckpt ls s3://bucket/runs"
    )
    root_of(*HERE)
    assert {name: os.environ[name] for name in mine} == mine
    assert commands.ckpt("ls", root) == "python -m ckpt ls s3://bucket/runs"


def test_flashblade_has_its_defaults_and_needs_an_endpoint(monkeypatch):
    choice = ("storage=flashblade_s3", "storage.root=s3://bucket")
    with pytest.raises(ConfigError, match=r"endpoint needs .* AWS_ENDPOINT_URL, which is not set"):
        load("train", list(choice))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://data-vip")
    monkeypatch.setenv("CKPT_S3_ADDRESSING", "virtual")
    assert root_of(*choice) == "s3://bucket"
    assert os.environ["CKPT_S3_ADDRESSING"] == "path"
    assert os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] == "when_required"
    assert os.environ["AWS_REGION"] == "us-east-1"


@pytest.mark.parametrize("kind", ["s3", "flashblade_nfs"])
def test_a_root_has_to_be_given(kind):
    with pytest.raises(ConfigError, match=r"storage\.root has no value: give it one with storage\.root="):
        load("train", [f"storage={kind}"])


def test_a_mount_that_is_missing_is_noticed_before_the_local_disk_fills_up(tmp_path):
    with pytest.raises(ConfigError, match=r"is on no NFS mount but on \w+: mount the file system first"):
        root_of("storage=flashblade_nfs", f"storage.root={tmp_path}/runs")
    assert list(tmp_path.iterdir()) == []
    mounts = (
        "20 1 8:1 / / rw - ext4 /dev/root rw\n"
        f"30 20 0:40 / {tmp_path} rw,noatime shared:7 - nfs4 array:/fs rw,vers=4.1\n"
        f"31 20 8:1 / {tmp_path}x rw - xfs /dev/sdb rw\n"
    )
    assert storage._file_system(tmp_path / "not" / "yet", mounts) == "nfs4"
    assert storage._file_system(tmp_path.parent, mounts) == "ext4"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("storage.s3.endpoint=data-vip:9000", "storage.s3.endpoint is 'data-vip:9000', which is no endpoint"),
        ("storage.s3.endpoint=https://vip/bucket", "give scheme, host and port only, as in https://vip"),
        ("storage.s3.addressing=dns", "storage.s3.addressing=dns must be one of path, virtual"),
        ("storage.s3.checksums=never", "storage.s3.checksums=never must be one of when_required"),
        ("storage.s3.part_mib=1", "storage.s3.part_mib=1 must be at least 5"),
        ("storage.s3.parts_in_flight=0", "storage.s3.parts_in_flight=0 must be at least 1"),
        ("storage.s3.deadline_s=soon", "storage.s3.deadline_s=soon must be a number"),
        ("storage.s3.ca_bundle=/no/such.pem", "storage.s3.ca_bundle is '/no/such.pem', which is no file"),
        ("storage.root=/data/runs", "storage.root=/data/runs is no address in an S3 store"),
        ("storage.root=s3//bucket/runs", "no address in an S3 store"),
        ("storage.s3.endpont=x", "did you mean 'storage.s3.endpoint'?"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_gets_one_line_with_its_name(override, says):
    with pytest.raises(ConfigError) as caught:
        root_of(*HERE, override)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "storage.s3.access_key_id=AKIAEXAMPLE",
        "+storage.s3.secret_access_key=verysecret",
        "++storage.key_id=AKIAEXAMPLE",
        "launcher.env.AWS_SESSION_TOKEN=verysecret",
    ],
)
def test_a_key_in_the_config_is_refused_and_not_repeated(override):
    with pytest.raises(ConfigError, match=r"keys don't belong into the config") as caught:
        load("train", [*HERE, override])
    assert "AKIAEXAMPLE" not in str(caught.value)
    assert "verysecret" not in str(caught.value)


def test_a_setting_of_an_object_store_without_one_says_what_is_missing():
    with pytest.raises(ConfigError, match=r"^storage\.s3\.endpoint is for an object store: add storage=s3"):
        load("train", ["storage.s3.endpoint=https://data-vip"])


def test_a_key_in_an_address_is_refused_and_not_repeated():
    with pytest.raises((ConfigError, StorageError)) as caught:
        root_of("storage=s3", "storage.root=s3://AKIAEXAMPLE:verysecret@bucket/runs")
    assert "verysecret" not in str(caught.value)


def test_your_keys_are_never_saved(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://data-vip")
    composed = load("train", ["storage=flashblade_s3", "storage.root=s3://bucket"])
    assert "verysecret" not in json.dumps([composed.values, composed.saved, composed.overrides])
    assert composed.saved["storage"]["s3"]["endpoint"] == "${oc.env:AWS_ENDPOINT_URL}"
