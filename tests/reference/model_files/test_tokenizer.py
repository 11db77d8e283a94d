from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import tokenizers

from lwkv.errors import ConfigError
from lwkv.reference import GGUFFile, tokenizer_from_folder, tokenizer_from_gguf

# "Ġ" is how byte-level BPE writes a space.
TOKENS = ["<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ab", "Ġab"]
MERGES = ["a b", "Ġ ab"]


def _gguf(path: Path, pre: str = "smollm") -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_a_gguf_tokenizer_merges_bytes_and_parts_digits_and_control_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(_gguf(tmp_path / "t.gguf"))
    tokens = tokenizer.encode("<|im_start|>ab ab12b<|im_end|>")
    assert tokens == [0, 7, 8, 5, 6, 3, 1]
    assert tokenizer.decode(tokens) == "ab ab12b"
    assert tokenizer.stop_tokens == {1}


def test_another_gguf_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\('gpt2', 'llama-bpe'\) is not supported; supported is"):
        tokenizer_from_gguf(_gguf(tmp_path / "t.gguf", "llama-bpe"))


@pytest.mark.parametrize(("end", "expected"), [(1, {1}), ([1, 0], {0, 1}), (None, set())])
def test_a_folders_tokenizer_and_stop_tokens_are_read(
    end: int | list[int] | None, expected: set[int], tmp_path: Path
) -> None:
    vocab = {token: number for number, token in enumerate(TOKENS)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("abb") == [7, 3]
    assert tokenizer.stop_tokens == expected


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer.json in"):
        tokenizer_from_folder(tmp_path)
