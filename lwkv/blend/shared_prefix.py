"""What segments are computed behind when they are cached, and what is dropped then."""

from __future__ import annotations

from typing import TypeAlias

from lwkv.blend.segments import Encode, added_ids
from lwkv.errors import ConfigError
from lwkv.keys import TokenIds, as_token_ids

# docs/blending.md has its figures, beside none and a chat's own beginning.
DEFAULT_TEXT = (
    "Below are passages from several documents. Read them, and then answer the question that follows.\n\n"
)

SharedPrefix: TypeAlias = "TokenIds | Encode"


def shared_prefix_ids(given: SharedPrefix | None) -> tuple[int, ...]:
    """The ids of a shared prefix: those given, or, of a tokenizer's `encode`, those it makes of DEFAULT_TEXT.

    What `encode` adds at the beginning of every text (BOS) stays, for that is where texts begin with the
    model; what it adds at the end does not.

    Raises:
        ConfigError: None. RequestError: no ids, given or made.
    """
    if given is None:
        raise ConfigError(
            "shared_prefix is not given; allowed: the tokenizer's encode, for the text that lwkv has for it, "
            "token ids of your own, as of a chat's beginning, or () for none"
        )
    if callable(given):
        made = list(given(DEFAULT_TEXT))
        given = made[: len(made) - added_ids(given)[1]]
    return tuple(as_token_ids(given).tolist())
