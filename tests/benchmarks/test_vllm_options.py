"""Options that all benchmarks of vLLM have."""

from __future__ import annotations

from pathlib import Path

from lwkv.benchmarks.measuring.shapes import SHAPES
from lwkv.benchmarks.vllm.options import parser_of, shape_of


def test_results_go_to_a_file_of_the_benchmarks_name() -> None:
    assert parser_of("vllm_pair", "What it does.").parse_args([]).output == Path("vllm-pair.json")


def test_a_shape_has_its_own_block_size_unless_another_is_given() -> None:
    parser = parser_of("vllm_pair", None)
    assert shape_of(parser.parse_args(["--shape", "tiny"])) == SHAPES["tiny"]
    assert shape_of(parser.parse_args(["--shape", "tiny", "--block-size", "48"])).block_size == 48
