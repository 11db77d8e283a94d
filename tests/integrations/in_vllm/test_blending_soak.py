"""A long random run of blends with few blocks and little memory: right answers, and nothing left."""

from __future__ import annotations

import random
from pathlib import Path

from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, assert_same, prompt, started
from integrations.in_vllm.test_blending import Documents, ask, blending, compute_again, count, settle

TURNS = 90
"""With two to six requests each: 300 and more."""


def test_random_requests_with_few_blocks_equal_an_engine_without_lwkv(
    llama: Path, plain: Elsewhere, tmp_path: Path
) -> None:
    """Those that are blended too, where all of their tokens are computed again.

    Requests are preempted, since a batch needs more blocks than there are; chunks are evicted, also without
    the scheduler's knowledge; requests are aborted; a step has room for parts of prompts only.
    """
    settings = blending(max_local_cpu_size=0.02, local_disk=str(tmp_path), max_local_disk_size=0.1)
    settings |= {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 1200 // BLOCK, "max_num_seqs": 8}
    drawn = random.Random(16)
    known = [prompt(900 + number, drawn.randrange(20, 150)) for number in range(8)]
    heads = [prompt(950 + number, drawn.randrange(4, 120)) for number in range(3)]
    asked_for = 0
    with started(llama, enable_prefix_caching=True, max_model_len=1024, **settings) as engine:
        for turn in range(TURNS):
            share = drawn.choice([0.0, 0.3, 1.0, 1.0])
            compute_again(engine, share)
            asked = []
            for number in range(drawn.randrange(2, 7)):
                parts = drawn.sample(known, drawn.randrange(1, 4))
                question = prompt(turn * 10 + number, drawn.randrange(1, 60))
                one = Documents(parts, question, drawn.choice(heads))
                if drawn.random() < 0.4:
                    one.segments = []
                asked.append(one)
            if drawn.random() < 0.1:
                engine.forget()
            if drawn.random() < 0.2:
                engine.evict_all()
            if drawn.random() < 0.1:
                extra = {"kv_transfer_params": {"lwkv_segments": asked[0].segments}}
                engine.abort(asked[0].ids, 1, extra)
            max_tokens = drawn.choice([1, 8, 40])
            answers = ask(engine, asked, max_tokens)
            asked_for += len(asked)
            exact = [n for n, one in enumerate(asked) if share == 1.0 or not one.segments]
            wanted = plain.ask([asked[n].ids for n in exact], max_tokens)
            assert_same([answers[n] for n in exact], wanted)
        settle(engine)
        engine.at_rest()
        assert len(engine.scheduler.blending) == 0
        assert count(engine, "requests") > 20
        assert engine.metric("vllm:num_preemptions") > 0
    assert asked_for >= 300
