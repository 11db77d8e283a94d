"""The Valkey tier with a real server: what it takes for a page, and how it is reached."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from storage.certificates import make_certificates, tls_options
from storage.places import make_setup
from storage.remote_place import ALL, LAYERS, LONG_S, PAGE_BYTES, Place, page_of
from storage.rig import key, keys
from storage.servers import (
    REDIS_OPTIONS,
    Server,
    any_server_program,
    free_port,
    redis_program,
    redis_server,
    require_client,
    running,
    tell,
    valkey_program,
    wait_until,
)

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.keys import LayerKey
from lwkv.storage import Status
from lwkv.storage.remote.valkey.address import read_address
from lwkv.storage.remote.valkey.client import ValkeyClient
from lwkv.storage.remote.valkey.connecting import connect
from lwkv.storage.remote.valkey.tier import ValkeyTier, examine, open_tier
from lwkv.storage.tier import Ordered

SECRET = "s3cret word"


@dataclass
class OnServer(Place):
    """A tier on a server that the test can talk to itself."""

    server: Server | None = None

    def tell(self, *words: str | bytes) -> bytes:
        assert self.server is not None
        return tell(self.server, *words)


def name_of(number: int) -> str:
    return f"lwkv:2:{{{key(number).to_string()}}}"


def seal_in_server(place: OnServer, number: int, layer: int) -> bytes:
    reply = place.tell("HGET", name_of(number), f"{layer}:seal")
    return reply.split(b"\r\n", 1)[1][:-2]


def open_place(server: Server, url: str) -> OnServer:
    return OnServer(url.format(port=server.port), server=server)


@pytest.fixture
def place(redis: Server) -> Iterator[OnServer]:
    opened = open_place(redis, "redis://127.0.0.1:{port}")
    opened.store(1, 2)
    yield opened
    opened.tier.close()


# What is taken for a page.

LOST = Status.MISS


def bytes_of(number: int, layer: int) -> bytes:
    return bytes(page_of(LayerKey(key(number), layer)).numpy())


def flipped(page: bytes) -> bytes:
    return page[:1000] + bytes([page[1000] ^ 1]) + page[1001:]


def write_over(place: OnServer, **fields: bytes) -> None:
    for field, value in fields.items():
        place.tell("HSET", name_of(1), field.replace("_", ":").replace("page:", ""), value)


def replace_by(place: OnServer, *command: str) -> None:
    place.tell("DEL", name_of(1))
    place.tell(command[0], name_of(1), *command[1:])


DAMAGE: dict[str, Callable[[OnServer], object]] = {
    "truncated": lambda place: write_over(place, page_1=bytes_of(1, 1)[:-1]),
    "too long": lambda place: write_over(place, page_1=bytes_of(1, 1) + b"x"),
    "other bytes": lambda place: write_over(place, page_1=flipped(bytes_of(1, 1))),
    "empty": lambda place: write_over(place, page_1=b""),
    "another layer's": lambda place: write_over(place, page_1=bytes_of(1, 2)),
    "another chunk's": lambda place: write_over(place, page_1=bytes_of(2, 1)),
    "without a page": lambda place: place.tell("HDEL", name_of(1), "1"),
    "without a seal": lambda place: place.tell("HDEL", name_of(1), "1:seal"),
    "with another seal": lambda place: write_over(place, page_1_seal=b"lwkv1 of mine"),
    "with a seal too long": lambda place: write_over(place, page_1_seal=b"x" * 300),
    "another chunk's with its seal": lambda place: write_over(
        place, page_1=bytes_of(2, 1), page_1_seal=seal_in_server(place, 2, 1)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_what_was_put_is_a_miss_and_its_chunk_is_not_promised_again(
    place: OnServer, damage: str
) -> None:
    DAMAGE[damage](place)
    assert place.load(1, 2) == [[Status.OK, LOST, Status.OK], ALL]
    assert place.there(1, 2) == [False, True]
    counted = place.counted()
    assert sum(counted.get(f"valkey_{why}", 0) for why in ("spoiled", "vanished")) == 1
    place.store(1)
    assert (place.there(1), place.load(1)) == ([True], [ALL])


@pytest.mark.parametrize("command", [("SET", "x"), ("LPUSH", "x"), ("SADD", "x")])
def test_something_else_under_a_chunks_key_is_a_miss_and_makes_room(
    place: OnServer, command: tuple[str, str]
) -> None:
    replace_by(place, *command)
    assert place.there(1, 2) == [False, True]
    assert place.load(1, 2) == [[LOST] * LAYERS, ALL]
    assert place.counted() == {"valkey_spoiled": 1, "valkey_vanished": LAYERS - 1}
    replace_by(place, *command)
    place.store(1)
    assert (place.there(1), place.load(1)) == ([True], [ALL])


@pytest.mark.parametrize("field", [f"{layer}{part}" for layer in range(LAYERS) for part in ("", ":seal")])
def test_a_chunk_that_lacks_a_page_or_a_seal_is_not_there(place: OnServer, field: str) -> None:
    place.tell("HDEL", name_of(1), field)
    assert place.there(1, 2) == [False, True]


def test_a_chunk_that_is_evicted_after_the_lookup_is_a_miss(place: OnServer) -> None:
    assert place.there(1, 2) == [True, True]
    place.tell("DEL", name_of(2))
    assert place.load(1, 2) == [ALL, [LOST] * LAYERS]
    assert place.counted() == {"valkey_vanished": LAYERS}


def test_a_chunk_is_one_key_so_that_it_is_evicted_whole(place: OnServer) -> None:
    assert place.tell("DBSIZE") == b":2\r\n"
    assert place.tell("HLEN", name_of(1)) == b":%d\r\n" % (2 * LAYERS)


def test_looking_a_chunk_up_has_the_server_keep_it(place: OnServer) -> None:
    """Servers evict what was not used for longest."""
    idle = ("OBJECT", "IDLETIME", name_of(1))
    wait_until(lambda: b":0" not in place.tell(*idle), "a second to pass")
    assert place.there(1) == [True]
    assert place.tell(*idle) == b":0\r\n"


def test_the_beginning_of_a_prompt_is_used_last(place: OnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    count = ValkeyClient.count_fields

    def note(client: ValkeyClient, names: Sequence[str]) -> list[int]:
        asked.extend(names)
        return count(client, names)

    monkeypatch.setattr(ValkeyClient, "count_fields", note)
    assert place.there(1, 2, 3) == [True, True, False]
    assert asked == [name_of(number) for number in (3, 2, 1)]


def test_what_is_there_already_is_not_sent_again(place: OnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    write = ValkeyClient.set

    def note(client: ValkeyClient, name: str, *rest: Any) -> bool:
        sent.append(name)
        return write(client, name, *rest)

    monkeypatch.setattr(ValkeyClient, "set", note)
    place.store(1, 2, 3)
    assert sent == [name_of(3)] * LAYERS
    place.tell("HDEL", name_of(1), "1:seal")
    place.store(1)
    assert sent[LAYERS:] == [name_of(1)] * (LAYERS - 1), "with these it is whole: its layer 0 was there"
    assert place.load(1, 2, 3) == [ALL] * 3


def end_of(place: OnServer, number: int) -> int:
    return int(place.tell("PEXPIRETIME", name_of(number))[1:])


def test_every_chunk_has_an_end_a_little_before_that_of_the_one_in_front_of_it(place: OnServer) -> None:
    assert isinstance(place.tier, Ordered)
    place.tier.follow(keys(3, 4, 5), LONG_S)
    place.store(5, 3, 4)
    assert end_of(place, 3) - end_of(place, 4) == end_of(place, 4) - end_of(place, 5) == 1
    before = end_of(place, 3)
    place.tier.follow(keys(5, 6), LONG_S)
    assert end_of(place, 3) >= before
    assert end_of(place, 3) - end_of(place, 5) == 2
    years = (before / 1000 - time.time()) / (365 * 24 * 3600)
    assert 9 < years < 11


def test_what_is_left_of_a_chunk_that_was_evicted_while_it_was_written_has_an_end_too(
    place: OnServer,
) -> None:
    """A key without an end stays for ever on a server whose policy is volatile-ttl."""
    asked = LayerKey(key(7), 1)
    assert place.tier.put([asked], [page_of(asked)], LONG_S) == [Status.OK]
    place.tell("DEL", name_of(7))
    asked = LayerKey(key(7), 2)
    assert place.tier.put([asked], [page_of(asked)], LONG_S) == [Status.OK]
    assert end_of(place, 7) > 0


def test_another_process_that_is_behind_does_not_bring_an_end_forward(place: OnServer) -> None:
    assert place.server is not None
    other = open_place(place.server, "redis://127.0.0.1:{port}")
    assert isinstance(place.tier, Ordered)
    assert isinstance(other.tier, ValkeyTier)
    other.tier._uses._clock = lambda: 1e9
    place.tier.follow(keys(1), LONG_S)
    before = end_of(place, 1)
    other.tier.follow(keys(1), LONG_S)
    other.store(1)
    assert end_of(place, 1) == before
    other.tier.close()


def test_a_server_that_is_full_refuses_puts_and_goes_on_answering(place: OnServer) -> None:
    place.tell("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(RuntimeError, match="maxmemory"):
            place.store(3)
        assert (place.there(1, 3), place.load(2)) == ([True, False], [ALL])
    finally:
        place.tell("CONFIG", "SET", "maxmemory", "0")
    place.store(3)
    assert place.load(3) == [ALL]


@pytest.mark.parametrize("program", [redis_program, valkey_program], ids=["redis", "valkey"])
def test_a_server_that_is_full_evicts_whole_chunks_and_what_it_promises_loads(
    tmp_path: Path, program: Callable[[], str]
) -> None:
    options = ("--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru")
    server = redis_server(program(), tmp_path, *options)
    with running(server):
        place = open_place(server, "redis://127.0.0.1:{port}")
        numbers = list(range(1, 601))
        for number in numbers:
            place.store(number)
        place.tell("CONFIG", "SET", "maxmemory", "0")  # the buffers of reads count too, and would evict more
        there = place.there(*numbers)
        assert 0 < sum(there) < len(numbers)
        assert place.load(*numbers) == [ALL if whole else [LOST] * LAYERS for whole in there]
        # As many as fit: nothing of what was evicted in part takes room.
        assert place.tell("DBSIZE") == b":%d\r\n" % sum(there)
        place.tier.close()


def test_one_call_takes_no_longer_than_its_deadline(place: OnServer) -> None:
    pages = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
    assert place.tier.get(key(1).split_layers(LAYERS), pages, 0.0) == [Status.ERROR] * LAYERS
    assert place.tier.put(key(3).split_layers(LAYERS), pages, 0.0) == [Status.ERROR] * LAYERS
    assert (place.load(1), place.there(3)) == ([ALL], [False])


# How servers are reached.


@pytest.fixture(params=[redis_program, valkey_program], ids=["redis", "valkey"])
def locked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server with a password."""
    server = redis_server(request.param(), tmp_path, "--requirepass", SECRET)
    with running(server):
        yield server


@pytest.mark.parametrize("login", [":s3cret%20word@", "default:s3cret%20word@", ""])
def test_the_right_password_opens(locked: Server, login: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not login:
        monkeypatch.setenv("LWKV_REMOTE_PASSWORD", SECRET)
    place = open_place(locked, f"valkey://{login}127.0.0.1:{{port}}")
    place.store(1)
    assert place.load(1) == [ALL]
    place.tier.close()


@pytest.mark.parametrize("login", ["", ":guess@", "nobody:s3cret%20word@"])
def test_a_wrong_login_is_refused_at_the_start_and_not_shown(
    locked: Server, login: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"redis://{login}127.0.0.1:{locked.port}"
    for attempt in (lambda: open_tier(url, make_setup(PAGE_BYTES, LAYERS)), lambda: examine(url, Config())):
        with pytest.raises(ConfigError, match="refuses user and password") as refused:
            attempt()
        told = f"{refused.value} {caplog.text} {capfd.readouterr()}"
        assert not any(word in told for word in ("guess", "nobody", SECRET, "s3cret"))


# As in docs/remote.md.
RIGHTS = "~lwkv:* +hmget +hset +hstrlen +hlen +hdel +unlink +pexpireat +info +client|setname"


def test_a_user_with_few_rights_is_enough(redis: Server) -> None:
    tell(redis, "ACL", "SETUSER", "lwkv", "reset", "on", ">word", *RIGHTS.split())
    place = open_place(redis, "redis://lwkv:word@127.0.0.1:{port}")
    place.store(1)
    assert (place.there(1, 2), place.load(1)) == ([True, False], [ALL])
    place.tell("HSET", name_of(1), "1", "")
    assert place.load(1) == [[Status.OK, LOST, Status.OK]]
    place.tier.close()


def test_a_user_who_may_not_write_can_still_read(redis: Server, place: OnServer) -> None:
    tell(redis, "ACL", "SETUSER", "reader", "reset", "on", ">word", *RIGHTS.replace("+hset", "").split())
    reader = open_place(redis, "redis://reader:word@127.0.0.1:{port}")
    with pytest.raises(RuntimeError, match=r"no permissions|NOPERM"):
        reader.put(3)
    assert reader.load(1) == [ALL]
    reader.tier.close()


def test_without_the_right_to_set_ends_chunks_are_kept_and_used_and_one_line_says_so(
    redis: Server, place: OnServer, caplog: pytest.LogCaptureFixture
) -> None:
    tell(redis, "ACL", "SETUSER", "old", "reset", "on", ">word", *RIGHTS.replace("+pexpireat", "").split())
    old = open_place(redis, "redis://old:word@127.0.0.1:{port}")
    old.store(3, 4)
    assert isinstance(old.tier, Ordered)
    old.tier.follow(keys(3, 4), LONG_S)
    assert (old.there(3, 4), old.load(3, 4)) == ([True, True], [ALL, ALL])
    (line,) = caplog.messages
    assert "the right +pexpireat" in line
    wait_until(lambda: b":0" not in place.tell("OBJECT", "IDLETIME", name_of(3)), "a second to pass")
    old.tier.follow(keys(3, 4), LONG_S)
    assert place.tell("OBJECT", "IDLETIME", name_of(3)) == b":0\r\n"
    old.tier.close()


def test_ends_are_set_again_after_a_server_has_refused_writes_for_a_while(
    place: OnServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(place.tier, Ordered)
    place.tell("REPLICAOF", "127.0.0.1", "1")  # as in a failover: "READONLY ..."
    with pytest.raises(RuntimeError, match=r"READONLY|read only"):
        place.tier.follow(keys(1, 2), LONG_S)
    place.tell("REPLICAOF", "NO", "ONE")
    assert caplog.messages == []
    place.tier.follow(keys(1, 2), LONG_S)
    place.store(3)
    for number in (1, 2, 3):
        assert int(place.tell("PTTL", name_of(number))[1:]) > 0, "volatile-ttl evicts only what has an end"


def test_a_server_that_is_not_there_yet_is_reported_once_and_used_as_soon_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = redis_server(any_server_program(), tmp_path)
    place = open_place(server, f"redis://:{SECRET.replace(' ', '')}@127.0.0.1:{{port}}")
    assert len(caplog.messages) == 1
    assert "every chunk is a miss there until it answers" in caplog.text
    assert "s3cret" not in caplog.text
    for call in (lambda: place.there(1), lambda: place.load(1), lambda: place.store(1)):
        with pytest.raises(ConnectionError, match="cannot be reached"):
            call()
    with running(server):
        place.store(1)
        assert (place.there(1), place.load(1)) == ([True], [ALL])
        place.tier.close()


def test_a_client_that_cannot_connect_does_not_try_again_in_child_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_client()
    told: list[Callable[[], None]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: told.append(after_in_child))
    with pytest.raises(ConnectionError, match="cannot be reached"):
        connect(read_address(f"valkey://127.0.0.1:{free_port()}"))
    (connects_again,) = told
    assert connects_again.__self__.closed


def test_one_database_does_not_see_another(redis: Server) -> None:
    first, second = (open_place(redis, f"redis://127.0.0.1:{{port}}/{number}") for number in (1, 2))
    first.store(1)
    assert (first.there(1), second.there(1)) == ([True], [False])
    for place in (first, second):
        place.tier.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://here/main", "what follows the / is no number of a database"),
        ("rediss://here?cert=/a", "cert and key go together"),
        ("redis://here?ca=/a", "write valkeys:// or rediss://"),
        ("rediss://here?ca=/not/there", "ca cannot be read: .*No such file"),
        ("redis://here?timeout_s=0", "timeout_s is '0'"),
        ("redis://here?replicas=2", "there is no option 'replicas'; allowed: cluster, timeout_s"),
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_address(url)


def test_several_hosts_are_a_cluster_unless_told_otherwise() -> None:
    urls = ("redis://a", "redis://a,b", "redis://a?cluster=true", "redis://a,b?cluster=false")
    assert [read_address(url).cluster for url in urls] == [False, True, True, False]


def test_without_its_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "glide_sync", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[valkey\]' in lwkv's folder"):
        open_tier("redis://here", make_setup(PAGE_BYTES, LAYERS))


def test_a_client_that_is_too_old_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    require_client()
    monkeypatch.setattr(
        "glide_sync.GlideClient._execute_command", lambda self, request_type, args, route: None
    )
    with pytest.raises(ConfigError, match=r"valkey-glide-sync [0-9.]+ .* 2\.6 .*lacks GlideClient\._execute"):
        open_tier("redis://here", make_setup(PAGE_BYTES, LAYERS))


def test_what_the_server_refuses_is_raised_and_not_written_to_the_terminal(
    place: OnServer, capfd: pytest.CaptureFixture[str]
) -> None:
    place.tell("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(RuntimeError, match="maxmemory"):
            place.store(3)
    finally:
        place.tell("CONFIG", "SET", "maxmemory", "0")
    replace_by(place, "SET", "x")
    place.store(1)
    assert capfd.readouterr() == ("", "")


def test_the_doctor_is_told_how_the_server_is(redis: Server) -> None:
    found = examine(f"redis://127.0.0.1:{redis.port}", Config())
    assert found["server"] == f"redis://127.0.0.1:{redis.port}"
    assert found["state"].startswith("answers, connected in ")


# Encrypted.


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[Server]:
    """A server that talks TLS only, with those who have a certificate."""
    program, port = redis_program(), free_port()
    make_certificates(tmp_path)
    server = Server([program, *REDIS_OPTIONS, *tls_options(port)], port, tmp_path)
    with running(server):
        yield server


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_an_encrypted_server_is_used_with_authority_and_certificate(
    encrypted: Server, tmp_path: Path, scheme: str
) -> None:
    files = "&".join(f"{name}={tmp_path / name}.pem" for name in ("ca", "cert", "key"))
    place = open_place(encrypted, f"{scheme}://127.0.0.1:{{port}}?{files}")
    place.store(1)
    assert place.load(1) == [ALL]
    place.tier.close()
