"""Object stores that don't do all that S3 promises, played by a small server of our own."""

import hashlib
import multiprocessing
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from ckpt.errors import StorageError
from ckpt.store import open_store
from ckpt.stores import client
from ckpt.stores.options import S3Options


class Handler(BaseHTTPRequestHandler):
    """Objects in a dict. `server.create_only` is `honoured`, `ignored` or `refused`; `server.answers` are
    given, once each, instead of doing what is asked, as (method, status, headers, body)."""

    protocol_version = "HTTP/1.1"

    def _do(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        key, query = unquote(address.path).removeprefix("/bucket").lstrip("/"), parse_qs(address.query)
        with self.server.lock:
            self.server.seen.append((self.command, key))
            for answer in self.server.answers:
                if answer[0] == self.command:
                    self.server.answers.remove(answer)
                    return self._answer(*answer[1:])
            return getattr(self, f"_{self.command.lower()}")(key, query, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _do  # noqa: N815

    def _put(self, key, query, body):
        if self.headers.get("If-None-Match"):
            if self.server.create_only == "refused":
                return self._error(501, "NotImplemented")
            if self.server.create_only == "honoured" and key in self.server.objects:
                return self._error(412, "PreconditionFailed")
        self.server.objects[key] = body
        return self._answer(200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b"")

    def _get(self, key, query, body):
        if "list-type" in query:
            return self._list(query)
        if key not in self.server.objects:
            return self._error(404, "NoSuchKey")
        made = {"ETag": '"1-1"', "Last-Modified": "Tue, 01 Dec 2026 10:00:00 GMT"}
        return self._answer(200, made, self.server.objects[key])

    _head = _get

    def _delete(self, key, query, body):
        self.server.objects.pop(key, None)
        return self._answer(204, {}, b"")

    def _post(self, key, query, body):
        return self._error(501, "NotImplemented")

    def _list(self, query):
        prefix = query.get("prefix", [""])[0]
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>x</ETag>"
            "<LastModified>2026-12-01T10:00:00.000Z</LastModified></Contents>"
            for key, data in self.server.objects.items()
            if key.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return self._answer(200, {}, text.encode())

    def _error(self, status, code):
        return self._answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(self, status, headers, body):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.lock, made.objects, made.seen, made.answers = threading.Lock(), {}, [], []
        made.create_only = "honoured"
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        for name in [n for n in os.environ if n.startswith(("AWS_", "CKPT_S3_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
        monkeypatch.setenv("CKPT_S3_DEADLINE_S", "5")
        yield made
        made.shutdown()


@pytest.fixture
def store(server):
    return open_store("s3://bucket/run")


@pytest.mark.parametrize("create_only", ["honoured", "ignored", "refused"])
def test_a_create_is_exclusive_whatever_the_store_makes_of_create_only_writes(server, store, create_only):
    server.create_only = create_only
    won = []
    threads = [
        threading.Thread(target=lambda me=me: won.append((store.create("k", me), me)))
        for me in (b"a", b"b", b"c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [me for made, me in won if made] == [server.objects["run/k"]]
    assert not store.create("k", b"late") and store.read("k") in (b"a", b"b", b"c")
    assert set(server.objects) == {"run/k"}, "nothing is left of the probe"


def test_whether_a_store_takes_create_only_writes_is_asked_once(server, store):
    for number in range(3):
        assert store.create(f"{number}", b"x")
    assert open_store("s3://bucket/other").create("k", b"x")
    assert len([key for _, key in server.seen if "probe" in key]) == 3  # two writes and a delete


@pytest.mark.parametrize("headers", [{}, {"ETag": '"00000000000000000000000000000000"'}])
def test_a_write_answered_well_with_an_error_inside_is_not_taken_for_done(server, store, headers):
    error = b"<Error><Code>InternalError</Code></Error>"
    server.answers += [("PUT", 200, headers, error)] * 2
    store.put("k", b"content")
    assert server.objects["run/k"] == b"content"
    assert store.create("warm", b"x")
    server.answers += [("PUT", 200, headers, error)]
    assert store.create("c", b"content")
    assert server.objects["run/c"] == b"content"


def test_a_tree_goes_also_where_the_bulk_request_is_unknown(server, store):
    for key in ("t/a", "t/b/c", "tt"):
        store.put(key, b"x")
    store.delete_tree("t")
    assert set(server.objects) == {"run/tt"}


def test_a_conflict_of_writers_is_waited_out_and_not_taken_for_existence(server, store):
    assert store.create("warm", b"x")
    server.answers.append(("PUT", 409, {}, b"<Error><Code>ConditionalRequestConflict</Code></Error>"))
    assert store.create("k", b"mine")


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (404, "NoSuchBucket", "there is no bucket bucket at http"),
        (403, "InvalidAccessKeyId", "doesn't know the access key"),
        (403, "SignatureDoesNotMatch", "doesn't belong to its access key"),
        (403, "AccessDenied", "policy"),
        (403, "RequestTimeTooSkewed", "set the clock"),
        (301, "PermanentRedirect", "AWS_REGION"),
        (507, "InsufficientStorage", "InsufficientStorage"),
    ],
)
def test_what_does_not_pass_is_said_once_and_at_once(server, store, status, code, advice):
    text = f"<Error><Code>{code}</Code><StringToSign>hush</StringToSign></Error>"
    server.answers.append(("PUT", status, {}, text.encode()))
    with pytest.raises(StorageError, match=advice) as caught:
        store.put("k", b"x")
    assert str(caught.value).startswith("can't write s3://bucket/run/k: ")
    assert "hush" not in str(caught.value) + repr(caught.value.__cause__) and "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(server.seen) == 1


def test_something_else_than_an_object_store_is_told_within_seconds(server, store, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_CONTACT_S", 0.5)
    server.answers += [("GET", 200, {}, b"<html>Welcome</html>")] * 50
    with pytest.raises(StorageError, match="an S3 server is at this endpoint"):
        store.read("run.json")


def _use(queue):
    try:
        open_store("s3://bucket/run").size("k")
    except StorageError as error:
        queue.put(str(error))


def test_a_process_forked_after_use_is_told_instead_of_hanging(server, store):
    store.size("k")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use, args=(queue,))
    child.start()
    assert "forked" in queue.get(timeout=30)
    child.join(30)


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", "a//b", "a\0b", ".", "a\nb"])
def test_a_key_never_leaves_the_run(store, server, key):
    for operation in (store.read, store.size, store.delete, store.delete_tree, store.list):
        with pytest.raises(StorageError, match="not a name inside"):
            operation(key)
    assert server.seen == []


def test_options_come_from_the_environment_and_wrong_ones_are_named():
    made = S3Options.from_environment(
        {
            "AWS_ENDPOINT_URL": "https://s3.lab:9000/",
            "AWS_DEFAULT_REGION": "lab",
            "CKPT_S3_ADDRESSING": "virtual",
        }
    )
    assert (made.endpoint, made.region, made.virtual_hosted) == ("https://s3.lab:9000", "lab", True)
    assert S3Options.from_environment({}) == S3Options()
    for name, wrong, advice in [
        ("AWS_ENDPOINT_URL", "s3.lab", "https://s3.lab"),
        ("AWS_ENDPOINT_URL", "https://s3.lab/bucket", "https://s3.lab"),
        ("CKPT_S3_ADDRESSING", "host", "path or virtual"),
        ("CKPT_S3_PART_MIB", "4", "from 5 to 5120"),
        ("CKPT_S3_PARTS_IN_FLIGHT", "many", "from 1 to 256"),
        ("AWS_REQUEST_CHECKSUM_CALCULATION", "never", "when_required"),
    ]:
        with pytest.raises(StorageError, match=f"{name} .*{advice}"):
            S3Options.from_environment({name: wrong})
    with pytest.raises(StorageError) as caught:
        S3Options.from_environment({"AWS_ENDPOINT_URL": "https://key:hush@host"})
    assert "hush" not in str(caught.value)


def test_the_bucket_stands_in_the_host_name_where_that_is_asked_for(server, monkeypatch):
    monkeypatch.setenv("CKPT_S3_ADDRESSING", "virtual")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.lab")
    assert open_store("s3://bucket/run").raw.config["endpoint"] == "https://bucket.s3.lab"


def test_a_forked_process_lets_go_of_none_of_its_parents_clients(monkeypatch):
    class Held:
        parent = os.getpid()

        def __del__(self) -> None:
            if os.getpid() != self.parent:
                os._exit(3)  # where a real client would wait for a lock of a thread that is not here

    monkeypatch.setattr(client, "_clients", {("a bucket",): Held()})
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
