"""One connection to a Valkey or Redis server, or to a cluster of them, through the official client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lwkv.storage.remote.valkey.shards import Shard

REFUSALS = ("NOPERM", "PermissionDenied")
"""What a server says of what a user may not do."""
_NO_ENDS = (
    *REFUSALS,
    *("no permissions", "wrong number of arguments", "Unsupported option", "syntax error", "unknown command"),
)
"""What a server says that will never set ends; other refusals pass, as READONLY in a failover does."""


class RefusedError(RuntimeError):
    """The server is there and answers a command with an error."""


class WrongTypeError(RefusedError):
    """Under this key there is something else than a hash."""


class ValkeyClient:
    """A connection, for one thread at a time. It connects again by itself.

    Every method raises ConnectionError where the server does not answer in time or is gone, RefusedError
    where it answers with an error.
    """

    def __init__(self, client: Any, glide: Any) -> None:
        self._client = client
        self._glide = glide
        self._clustered = isinstance(client, glide.GlideClusterClient)
        # The client's own hmget takes no buffers, where its mget does: each page would be copied once more.
        self._hmget = partial(client._execute_command, glide.sync_commands.core.RequestType.HMGet)
        self.usable = True

    def get(self, key: str, fields: Sequence[str], buffers: Sequence[memoryview]) -> list[int | None]:
        """Read fields of a hash, whole, each into its buffer; the length of each, None where there is none.

        A field that is too long for its buffer is refused.
        """
        with self._errors():
            found = self._hmget([key, *fields], response_buffers=list(buffers))
        return [None if length is None else int(length) for length in found]

    def set(self, key: str, fields: Mapping[str, memoryview | bytes], until_ms: int | None = None) -> bool:
        """Write fields of a hash, all at once; if it has no end yet it ends at `until_ms` since the epoch.

        False where the server refuses the end, and only that, whatever the key.
        """
        no_end = self._glide.ExpireOptions.HasNoExpiry
        commands: list[Callable[[Any], object]] = [lambda commands: commands.hset(key, fields)]
        if until_ms is not None:
            commands.append(lambda commands: commands.pexpireat(key, until_ms, no_end))
        with self._errors():
            written, *ends = self._run(commands)
            _checked(written)
            return _are_set(ends)

    def keep(self, keys: Sequence[str], until_ms: Sequence[int]) -> bool:
        """Have each key end then, in ms since the epoch, unless it ends later, and count as used just now.

        In this order. Keys may not be there; all have the same server. False where it refuses that for good.
        """
        later = self._glide.ExpireOptions.NewExpiryGreaterThanCurrent
        pairs = zip(keys, until_ms, strict=True)
        with self._errors():
            return _are_set(self._run([partial(_end_at, key, until, later) for key, until in pairs]))

    def lengths(self, key: str, fields: Sequence[str]) -> list[int]:
        """The length of each field in bytes; 0 where there is none."""
        return [int(self._one(partial(_ask_size, key, field))) for field in fields]

    def remove_fields(self, key: str, fields: Sequence[str]) -> None:
        """Remove fields that may be there."""
        self._one(lambda commands: commands.hdel(key, list(fields)))

    def remove(self, key: str) -> None:
        """Remove a key that may be there, whatever it has."""
        self._one(lambda commands: commands.unlink([key]))

    def count_fields(self, keys: Sequence[str]) -> list[int]:
        """Count the fields of each hash, in this order, and have it count as used just now.

        0 for something else than a hash. All keys have the same server.
        """
        results = self._run([partial(_ask_length, key) for key in keys])
        with self._errors():
            return [0 if _is_wrong_type(result) else int(_checked(result)) for result in results]

    def shards(self) -> list[Shard]:
        """Who serves which keys; one that has all of them where there is no cluster."""
        if not self._clustered:
            return [Shard(0, "the server")]
        with self._errors():
            rows = self._client.custom_command(["CLUSTER", "SLOTS"])
        return [Shard(first, f"{host.decode()}:{port}") for first, _, (host, port, *_), *_ in rows]

    def close(self) -> None:
        self.usable = False
        with self._errors():
            self._client.close()

    def _one(self, command: Callable[[Any], object]) -> Any:
        with self._errors():
            return _checked(self._run([command])[0])

    def _run(self, commands: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Make calls of a client's commands; the result of each, which is an error where it was refused."""
        # In a cluster one by one: while a node is down, batches and commands of several slots time out even
        # where none of their keys is on that node. Where there is none, what a batch is refused raises
        # nothing; what a single command is refused the client also writes to the terminal.
        with self._errors():
            if self._clustered:
                return [self._alone(command) for command in commands]
            batch: Any = self._glide.Batch(is_atomic=False)
            for command in commands:
                command(batch)
            return self._client.exec(batch, raise_on_error=False) or []

    def _alone(self, command: Callable[[Any], object]) -> Any:
        glide = self._glide
        try:
            return command(self._client)
        except (glide.TimeoutError, glide.ConnectionError):
            raise
        except glide.RequestError as error:
            return error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        glide = self._glide
        try:
            yield
        except glide.ClosingError as error:
            self.usable = False
            raise ConnectionError(f"the connection was closed: {error}") from None
        except (glide.TimeoutError, glide.ConnectionError) as error:
            raise ConnectionError(f"no answer: {error}") from None
        except glide.RequestError as error:
            kind = WrongTypeError if _is_wrong_type(error) else RefusedError
            raise kind(f"the server refuses: {error}") from None


def _ask_size(key: str, field: str, commands: Any) -> object:
    return commands.hstrlen(key, field)


def _end_at(key: str, until_ms: int, option: Any, commands: Any) -> object:
    return commands.pexpireat(key, until_ms, option)


def _are_set(ends: Sequence[Any]) -> bool:
    """False where the server sets no ends at all. Raises what it refuses for now only."""
    refused = [end for end in ends if isinstance(end, Exception)]
    for error in refused:
        if not any(words in str(error) for words in _NO_ENDS):
            raise error
    return not refused


def _ask_length(key: str, commands: Any) -> object:
    return commands.hlen(key)


def _is_wrong_type(result: object) -> bool:
    return isinstance(result, Exception) and "WRONGTYPE" in str(result)


def _checked(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result
