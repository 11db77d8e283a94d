"""The demo's findings as text."""

from __future__ import annotations

from collections.abc import Iterator

from lwkv.cli.demo.findings import DemoFindings, Timing


def report_lines(found: DemoFindings) -> Iterator[str]:
    """Write the findings for a reader, line by line."""
    yield from _setting(found)
    yield from _answers(found)
    yield from _times(found)
    yield from _checks(found)
    yield "Files"
    yield from (f"  {file}" for file in found.files)
    if found.faults:
        yield ""
        yield "Faults"
        yield from (f"  - {fault}" for fault in found.faults)


def _setting(found: DemoFindings) -> Iterator[str]:
    on = found.setting
    yield f"Platform  {on.platform}: {on.why}"
    threads = f", compute threads: {on.threads}" if on.platform == "cpu" else ""
    yield f"          device {on.device}, {on.kernels} kernels{threads}"
    yield f"Model     {on.model}, {on.num_layers} layers, {on.dtype}, chunks of {on.chunk_size} tokens"
    yield ""


def _answers(found: DemoFindings) -> Iterator[str]:
    first, second = found.answers
    yield f"1  {first.question}"
    yield f"   {first.answer}"
    yield f"   cold: {first.num_computed} tokens computed; {found.num_stored} of them stored meanwhile"
    yield ""
    yield f"2  {second.question}"
    yield f"   {second.answer}"
    yield (
        f"   warm: {found.num_hit} of {second.num_prompt} tokens hit; {found.num_retrieved} served from the "
        f"cache by the engine's own count, {second.num_computed} computed"
    )
    yield ""


def _times(found: DemoFindings) -> Iterator[str]:
    yield "Time to first token, medians"
    yield _first_token("cold, stored meanwhile", found.cold)
    yield _first_token("warm, loaded in bulk", found.bulk)
    yield _first_token("warm, loaded by layers", found.layerwise)
    yield ""
    yield "Load time of the median run"
    yield _load("in bulk", found.bulk)
    yield _load("by layers", found.layerwise)
    yield ""


def _checks(found: DemoFindings) -> Iterator[str]:
    yield "Checks"
    for number, answer in enumerate(found.answers, 1):
        same = answer.tokens == answer.recomputed_tokens
        verdict = "equals full recompute" if same else "DIFFERS from full recompute"
        yield f"  answer {number} {verdict}, token by token ({len(answer.recomputed_tokens)} tokens)"
    yield f"  logits with loaded KV {_drift(found)}"
    yield f"  one loaded block changed on purpose: {_spoiled(found)}"
    yield ""


def _drift(found: DemoFindings) -> str:
    lead = f"the best token was ahead of the next one by {found.closest_choice:.2g} at least"
    if found.logit_drift is None:
        return f"are not numbers; {lead}"
    if found.logit_drift == 0:
        return f"equal those of full recompute, in the same steps, bit for bit; {lead}"
    return f"differ by up to {found.logit_drift:.2g} from those of full recompute; {lead}"


def _spoiled(found: DemoFindings) -> str:
    if found.spoiled_drift is None:
        return "the logits are not numbers"
    text = (
        "the same answer" if found.spoiled_answer == found.answers[1].answer else repr(found.spoiled_answer)
    )
    return f"{text}, logits differ by up to {found.spoiled_drift:.2g}"


def _first_token(name: str, timing: Timing) -> str:
    spread = f"{timing.fastest * 1e3:.1f} to {timing.slowest * 1e3:.1f} in {timing.num_runs} runs"
    return f"  {name:22}  {timing.median * 1e3:8.1f} ms" + (f"  ({spread})" if timing.num_runs > 1 else "")


def _load(name: str, timing: Timing) -> str:
    hidden, exposed = timing.load_hidden * 1e3, timing.load_exposed * 1e3
    return f"  {name:22}  {hidden:8.2f} ms hidden behind compute, {exposed:.2f} ms exposed"
