"""Keys of an S3 store: where they come from, when they are read again, and that nobody gets to see them."""

import datetime as dt
import json
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckpt.errors import StorageError
from ckpt.store import open_store
from ckpt.stores.credentials import Command, Environment, Profile, Provider, source_of

SECRET = "hush-hush-secret"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    import os

    for name in [n for n in os.environ if n.startswith(("AWS_", "CKPT_S3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def printing(tmp_path, **fields):
    """A credential command that prints what the file it leaves behind says, and counts its runs."""
    said, runs = tmp_path / "said.json", tmp_path / "runs"
    said.write_text(json.dumps({"Version": 1, **fields}))
    script = f"open({str(runs)!r}, 'a').write('x'); print(open({str(said)!r}).read())"
    return f"{sys.executable} -c {shlex.quote(script)}", said, runs


def aws(tmp_path, credentials="", config=""):
    (tmp_path / ".aws").mkdir(exist_ok=True)
    (tmp_path / ".aws" / "credentials").write_text(credentials)
    (tmp_path / ".aws" / "config").write_text(config)


def test_the_environment_gives_keys(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "T")
    source = source_of()
    assert source == Environment()
    keys = source.read()
    assert (keys.access_key_id, keys.secret_access_key, keys.token) == ("AK", SECRET, "T")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StorageError, match="set together"):
        source_of().read()


def test_a_profile_gives_keys_from_either_file(tmp_path, monkeypatch):
    aws(
        tmp_path,
        f"[default]\naws_access_key_id = D\naws_secret_access_key = {SECRET}\n",
        f"[profile lab]\naws_access_key_id=L\naws_secret_access_key={SECRET}%x\naws_session_token = T\n",
    )
    assert source_of().read().access_key_id == "D"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    keys = source_of().read()
    assert (keys.access_key_id, keys.secret_access_key, keys.token) == ("L", f"{SECRET}%x", "T")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "other"))
    (tmp_path / "other").write_text(f"[lab]\naws_access_key_id=O\naws_secret_access_key={SECRET}\n")
    assert source_of().read().access_key_id == "O"
    monkeypatch.setenv("AWS_PROFILE", "labb")
    with pytest.raises(StorageError, match=r"profile labb of .*other holds no keys"):
        source_of().read()


def test_a_command_gives_keys_and_their_end(tmp_path, monkeypatch):
    until = "2031-01-02T03:04:05Z"
    line, _, _ = printing(
        tmp_path, AccessKeyId="C", SecretAccessKey=SECRET, SessionToken="T", Expiration=until
    )
    monkeypatch.setenv("CKPT_S3_CREDENTIAL_COMMAND", line)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    keys = source_of().read()
    assert (keys.access_key_id, keys.token) == ("C", "T")
    assert keys.expires_at == dt.datetime(2031, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    monkeypatch.delenv("CKPT_S3_CREDENTIAL_COMMAND")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    aws(tmp_path, config=f"[default]\ncredential_process = {line}\n")
    assert isinstance(source_of(), Profile) and source_of().read().access_key_id == "C"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/no/such/command", "No such file"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "exit code 3"),
        (f"{sys.executable} -c 'print(1)'", "has to print JSON"),
        (f"{sys.executable} -c 'print(\"{SECRET}\")'", "has to print JSON"),
        ("a 'b", "quotes"),
    ],
)
def test_a_command_that_fails_is_named_and_not_quoted(line, problem):
    with pytest.raises(StorageError, match=problem) as caught:
        Command(line, "CKPT_S3_CREDENTIAL_COMMAND").read()
    assert "CKPT_S3_CREDENTIAL_COMMAND" in str(caught.value) and SECRET not in str(caught.value)


def test_keys_that_are_about_to_end_are_read_again_before_they_do(tmp_path, monkeypatch):
    from ckpt.stores import credentials

    monkeypatch.setattr(credentials, "_READ_AGAIN_S", 0)
    soon = (dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)).isoformat()
    line, said, runs = printing(tmp_path, AccessKeyId="1", SecretAccessKey=SECRET, Expiration=soon)
    provider = Provider(Command(line, "X"))
    assert provider()["access_key_id"] == "1"
    later = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).isoformat()
    said.write_text(json.dumps({"AccessKeyId": "2", "SecretAccessKey": SECRET, "Expiration": later}))
    assert [provider()["access_key_id"] for _ in range(3)] == ["2"] * 3
    assert len(runs.read_text()) == 2
    said.write_text("{}")
    assert provider.refresh(provider.generation) is False and provider()["access_key_id"] == "2"


def test_of_many_requests_that_fail_at_once_one_reads_the_keys_again(tmp_path):
    line, said, runs = printing(tmp_path, AccessKeyId="1", SecretAccessKey=SECRET)
    provider = Provider(Command(line, "X"))
    provider.keys()
    seen = provider.generation
    said.write_text(json.dumps({"AccessKeyId": "2", "SecretAccessKey": SECRET}))
    renewed = []
    threads = [threading.Thread(target=lambda: renewed.append(provider.refresh(seen))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert renewed == [True] * 6 and len(runs.read_text()) == 2


class Picky(BaseHTTPRequestHandler):
    """Takes only requests signed by the access key `good`; answers others with `server.refusal`."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        signed_by = self.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        self.server.seen.append(signed_by)
        if signed_by == "good":
            self._answer(200, b"")
        else:
            text = (
                f"<Error><Code>ExpiredToken</Code><Message>{self.headers['Authorization']}</Message></Error>"
            )
            self._answer(400, text.encode())

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("ETag", '"1-1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def picky():
    with ThreadingHTTPServer(("127.0.0.1", 0), Picky) as server:
        server.seen, server.refusal = [], (400, "ExpiredToken")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("refusal", "end"), [((400, "ExpiredToken"), None), ((403, "AccessDenied"), "2020-01-01T00:00:00Z")]
)
def test_a_write_goes_on_with_new_keys_when_the_old_ones_end_meanwhile(
    tmp_path, monkeypatch, picky, refusal, end
):
    picky.refusal = refusal
    line, said, runs = printing(tmp_path, AccessKeyId="old", SecretAccessKey=SECRET, Expiration=end)
    monkeypatch.setenv("CKPT_S3_CREDENTIAL_COMMAND", line)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{picky.server_port}")
    store = open_store("s3://bucket/run")
    threading.Timer(
        0.3, said.write_text, (json.dumps({"AccessKeyId": "good", "SecretAccessKey": SECRET}),)
    ).start()
    store.put("k", b"1")
    assert picky.seen[0] == "old" and picky.seen[-1] == "good"
    count = len(runs.read_text())
    store.put("k", b"2")
    assert len(runs.read_text()) == count


def test_keys_stand_in_no_error_and_no_repr(tmp_path, monkeypatch, picky, caplog):
    import traceback

    from ckpt.stores import client

    monkeypatch.setattr(client, "_FIRST_CONTACT_S", 0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}-token")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{picky.server_port}")
    store = open_store("s3://bucket/run")
    with pytest.raises(StorageError) as caught:
        store.put("k", b"1")
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    shown += repr((store, store._client, store.raw, store._client.provider, store._client.provider.keys()))
    assert "ExpiredToken" in shown
    assert SECRET not in shown and "AKIAEXAMPLE" not in shown and "Signature=" not in shown


def test_without_any_keys_it_is_said_what_to_set(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"no credentials for bucket bucket .*AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/run")
