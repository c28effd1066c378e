"""TLS to an object store: what is not trusted is refused at once, saying what to do."""

import datetime as dt
import ipaddress
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ckpt.errors import StorageError
from ckpt.store import open_store


def certificate(folder, name, signer=None, ca=False, host="127.0.0.1", days=1):
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer[0].subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=5))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca, None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False
        )
        .sign(signer[1] if signer else key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made, key


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    ca = certificate(folder, "ca", ca=True)
    certificate(folder, "other", ca=True)
    certificate(folder, "good", ca)
    certificate(folder, "wrong-host", ca, host="10.1.2.3")
    certificate(folder, "expired", ca, days=-1)
    certificate(folder, "self-signed")
    return folder


class Missing(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("shown", "trusted", "outcome"),
    [
        ("good", "ca", None),
        ("self-signed", "self-signed", None),
        ("good", "other", "signed by no CA known here: give its CA in AWS_CA_BUNDLE"),
        ("self-signed", "ca", "AWS_CA_BUNDLE"),
        ("ca", "ca", "CA:TRUE"),
        ("wrong-host", "ca", "another host"),
        ("expired", "ca", "expired"),
    ],
)
def test_a_certificate_is_trusted_or_refused_at_once_with_advice(
    certificates, monkeypatch, shown, trusted, outcome
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / f"{shown}.pem", certificates / f"{shown}.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Missing) as server:
        server.handle_error = lambda *_: None
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates / f"{trusted}.pem"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
        store = open_store("s3://bucket/run")
        began = time.monotonic()
        if outcome is None:
            with pytest.raises(FileNotFoundError):
                store.read("k")
        else:
            with pytest.raises(StorageError, match=outcome) as caught:
                store.read("k")
            assert str(server.server_port) in str(caught.value)
        assert time.monotonic() - began < 3
        server.shutdown()


def test_a_bundle_that_is_no_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with pytest.raises(StorageError, match=r"AWS_CA_BUNDLE .*no file"):
        open_store("s3://bucket/run")
