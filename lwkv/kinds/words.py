"""What a kind keeps, in words and bytes, for the log and for doctor."""

from __future__ import annotations

from math import gcd

from lwkv.kinds.kind import Kind


def describe_kind(kind: Kind) -> str:
    """What a kind keeps on one rank: "4 layers, blocks of 32 tokens with 16.0 KiB a layer, ..."."""
    layers = "1 layer" if kind.num_layers == 1 else f"{kind.num_layers} layers"
    if kind.form == "state":
        return (
            f"{layers}, {size(boundary_bytes(kind))} a state, one for at most every {kind.block_size} tokens"
        )
    blocks = f"{layers}, blocks of {kind.block_size} tokens with {size(kind.block_bytes)} a layer"
    each = f"{blocks}, {size(token_bytes(kind))} a token"
    if kind.form == "full":
        return f"{each}, of all tokens"
    return f"{each}, at most {size(boundary_bytes(kind))} where a prompt can go on"


def token_bytes(kind: Kind) -> float:
    """Bytes of one token in all layers, on one rank; of a state 0."""
    return 0 if kind.form == "state" else kind.num_layers * kind.block_bytes / kind.block_size


def boundary_bytes(kind: Kind) -> int:
    """Most bytes that one place where a prompt can go on needs, beside full attention; of that 0."""
    if kind.form == "full":
        return 0
    # Of local attention a prompt goes on whole blocks behind a multiple of the span.
    behind = {"window": kind.span - 1, "local": kind.span - gcd(kind.span, kind.block_size), "state": 1}
    return kind.num_layers * kind.block_bytes * -(-behind[kind.form] // kind.block_size)


def size(num_bytes: float) -> str:
    """A number of bytes with a unit."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.4g} bytes"
