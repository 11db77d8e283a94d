"""Certificates for servers on loopback, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from storage.servers import require

_OURS = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"
_ANOTHERS = "subjectAltName=DNS:elsewhere\nbasicConstraints=CA:FALSE\n"


def make_certificates(folder: Path) -> None:
    """Two authorities, ca.pem and stranger.pem, and what the first vouches for, all with key.pem.

    cert.pem is of this machine, another.pem of another one, old.pem has expired. self.pem is an authority.
    """
    require(shutil.which("openssl") is not None, "openssl")
    (folder / "ours").write_text(_OURS)
    (folder / "anothers").write_text(_ANOTHERS)
    sign = "x509 -req -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile"
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=lwkv-tests -keyout ca.key -out ca.pem",
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=stranger -keyout stranger.key -out stranger.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key.pem -out cert.csr",
        f"{sign} ours -days 2 -out cert.pem",
        f"{sign} anothers -days 2 -out another.pem",
        f"{sign} ours -days 0 -out old.pem",
        "req -x509 -key key.pem -days 2 -subj /CN=me -addext subjectAltName=IP:127.0.0.1 -out self.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


def tls_options(port: int, certificate: str = "cert.pem", *others: str) -> list[str]:
    """A Redis server's options for TLS alone, in the folder of `make_certificates`."""
    files = ["--tls-cert-file", certificate, "--tls-key-file", "key.pem", "--tls-ca-cert-file", "ca.pem"]
    return ["--port", "0", "--tls-port", str(port), *files, *others]
