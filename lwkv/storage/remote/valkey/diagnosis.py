"""Why a server cannot be used.

The client says of most faults that it timed out. So where it cannot connect, the server is asked once more,
by a socket of the standard library, and what it answers is put into words. None of them is the user's name or
password.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import BinaryIO, NamedTuple

from lwkv.storage.remote.valkey.address import ValkeyAddress

WRONG_LOGIN = (
    "the server refuses user and password; give them in the URL or as LWKV_REMOTE_USER and "
    "LWKV_REMOTE_PASSWORD"
)
NOT_ALLOWED = "the server does not allow the user what docs/remote.md lists"
_LEAST_S = 0.1
_LONGEST_LINE = 1 << 16
_WANTS_TLS = "it does not answer as a Valkey server; if it wants TLS, write valkeys:// or rediss://"
_WANTS_CERTIFICATE = "it ends the encrypted connection; if it wants a certificate, give cert and key"
_NO_TLS = "it does not answer with TLS; write valkey:// or redis:// if it wants none"
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_EOF_WHILE_READING")


class Fault(NamedTuple):
    """What is wrong; `is_setting` where it stays so until the address or the user's rights are changed."""

    text: str
    is_setting: bool = False


def find_fault(address: ValkeyAddress) -> Fault | None:
    """Ask each host until one has a fault, within the address's time to connect; None where none is found."""
    end = time.monotonic() + address.connect_timeout_s
    for host, port in address.url.hosts:
        fault = _fault_of(address, host, port, max(_LEAST_S, end - time.monotonic()))
        if fault is not None:
            several = len(address.url.hosts) > 1
            return fault._replace(text=f"{host}:{port}: {fault.text}") if several else fault
    return None


def _fault_of(address: ValkeyAddress, host: str, port: int, seconds: float) -> Fault | None:
    try:
        line = socket.create_connection((host, port), seconds)
    except socket.gaierror as error:
        return Fault(f"the name {host!r} is not known: {error.strerror}")
    except TimeoutError:
        return Fault(f"no connection within {seconds:.1f} s")
    except OSError as error:
        return Fault(error.strerror or str(error))
    silent = _NO_TLS if address.is_encrypted else _WANTS_TLS
    try:
        with line:
            return _examine(address, line, host)
    except ssl.SSLError as error:
        return Fault(_in_words(error))
    except TimeoutError:
        return Fault(f"it takes the connection, but says nothing within {seconds:.1f} s: {silent}")
    except OSError:
        return Fault(silent)


def _examine(address: ValkeyAddress, line: socket.socket, host: str) -> Fault | None:
    with ExitStack() as stack:
        if address.is_encrypted:
            encrypted = _context(address).wrap_socket(line, server_hostname=host)
            line = stack.enter_context(encrypted)
            if _is_its_own_authority(encrypted):
                return Fault("the server's certificate is its own authority, which the client refuses")
        try:
            return _talk(address, line, stack.enter_context(line.makefile("rb")))
        except (ConnectionError, ssl.SSLEOFError):
            return Fault(_closes(address))


def _context(address: ValkeyAddress) -> ssl.SSLContext:
    authorities, options = address.authorities, address.url.options
    context = ssl.create_default_context(
        cadata=None if authorities is None else authorities.decode("latin-1")
    )
    if address.identity is not None:
        # A password, so that nobody is asked for one at the terminal.
        context.load_cert_chain(options["cert"], options["key"], password="")
    return context


def _is_its_own_authority(line: ssl.SSLSocket) -> bool:
    certificate = line.getpeercert() or {}
    return certificate.get("subject") == certificate.get("issuer")


def _in_words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is refused: {error.verify_message}"
    reason = error.reason or str(error)
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return "the server wants a certificate: give cert and key"
    if reason in _NOT_TLS or isinstance(error, ssl.SSLEOFError):
        return _NO_TLS
    return f"TLS fails: {reason.replace('_', ' ').lower()}"


def _talk(address: ValkeyAddress, line: socket.socket, replies: BinaryIO) -> Fault | None:
    """Do what the client does when it connects."""
    for words in _commands(address):
        line.sendall(_packed(words))
        reply = _read(replies)
        if not reply or reply[0] not in b"+-:$*":
            return Fault(_closes(address))
        if reply.startswith(b"-"):
            return _refusal(address, words, reply[1:].decode(errors="replace").strip())
    return None


def _closes(address: ValkeyAddress) -> str:
    return _WANTS_CERTIFICATE if address.is_encrypted else _WANTS_TLS


def _commands(address: ValkeyAddress) -> Iterator[tuple[str, ...]]:
    url = address.url
    if url.password:
        yield ("AUTH", *([url.user] if url.user else []), url.password)
    if address.database is not None:
        yield ("SELECT", str(address.database))
    yield ("CLIENT", "SETNAME", "lwkv")
    yield ("INFO", "server")
    if address.cluster:
        yield ("CLUSTER", "SLOTS")


def _packed(words: tuple[str, ...]) -> bytes:
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _read(replies: BinaryIO) -> bytes:
    """The first line of a reply; a text that follows is read too."""
    first = replies.readline(_LONGEST_LINE)
    if first.startswith(b"$"):
        replies.read(int(first[1:]) + 2)
    return first


def _refusal(address: ValkeyAddress, words: tuple[str, ...], reply: str) -> Fault:
    code, command = reply.partition(" ")[0], " ".join(words[:2]) if words[0] != "AUTH" else "AUTH"
    if code in ("WRONGPASS", "NOAUTH"):
        return Fault(WRONG_LOGIN, is_setting=True)
    if code == "NOPERM":
        return Fault(f"{NOT_ALLOWED}: {command}", is_setting=True)
    if words[0] == "SELECT":
        return Fault(f"database {address.database} cannot be used: {reply}", is_setting=True)
    if words[0] == "AUTH":
        return Fault(WRONG_LOGIN, is_setting=True)
    return Fault(f"the server refuses {command}: {reply}")
