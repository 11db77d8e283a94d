"""What the demo over a restart found, as text."""

from __future__ import annotations

from collections.abc import Iterator

from lwkv.cli.demo.restart import Restart


def restart_lines(found: Restart) -> Iterator[str]:
    """Tell it to a reader, line by line."""
    stored, served = found.stored, found.served
    yield f"Tier      {found.tier}"
    yield ""
    yield f"1  {found.questions[0]}"
    yield f"   {stored.texts[0]}"
    yield f"   first process: {stored.num_stored} tokens stored; it has ended"
    yield ""
    yield f"2  {found.questions[1]}"
    yield f"   {stored.texts[1]}"
    yield (
        f"   second process: {served.num_hit} of {stored.num_prompt} tokens hit, {served.num_from_tier} of "
        f"them served from the tier {served.tier!r}"
    )
    verdict = "equals" if served.tokens == stored.recomputed else "DIFFERS from"
    yield f"   {verdict} full recompute, token by token ({len(served.tokens)} tokens)"
    yield ""
    yield "Time to first token of question 2"
    yield f"  computed by the first process      {stored.first_token_s * 1e3:8.1f} ms"
    yield f"  loaded by the second, by layers    {served.first_token_s * 1e3:8.1f} ms"
    read = served.stats.get(f"{served.tier}_get_bytes", 0)
    yield f"  {read / 2**20:.1f} MiB read from the tier"
    yield ""
    yield from _left_behind(found)
    if found.faults:
        yield ""
        yield "Faults"
        yield from (f"  - {fault}" for fault in found.faults)


def _left_behind(found: Restart) -> Iterator[str]:
    """What the demo leaves in the tier, and how to remove it."""
    if found.tier.startswith("file://"):
        yield "Nothing is left: the demo's folder in the tier has been removed"
        return
    yield "Left in the tier, found by nobody else: chunks with these in their names"
    yield from (f"  {name}" for name in found.stored.hashes)
    yield "On a Valkey or Redis server, this removes them:"
    yield f"  for name in {' '.join(found.stored.hashes)}; do"
    yield '    valkey-cli --scan --pattern "*$name*" | xargs -r valkey-cli unlink'
    yield "  done"
