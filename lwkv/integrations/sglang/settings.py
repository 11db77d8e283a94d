"""From `linker_extra_config` to lwkv's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lwkv.config.conflicts import Conflict
from lwkv.config.engine_settings import SGLANG
from lwkv.config.settings import Config
from lwkv.config.values import Allowed, Flag

NOT_KNOWN = 0


class Settings(Config):
    """lwkv's configuration in SGLang, whose chunks are SGLang's pages.

    Layer by layer is the default here, other than elsewhere: SGLang's pool waits for each layer.

    Attributes:
        page_size: SGLang's, in tokens.
    """

    place_of_arguments: ClassVar[str] = SGLANG.place
    page_size: ClassVar[int] = NOT_KNOWN
    # A prefill of few new tokens waits for the thread that launches it, which also queues its loads.
    usual_load_streams: ClassVar[int] = 1

    use_layerwise: Flag = Field(True, description="Load and save layer by layer while the model computes.")
    on_flush: Annotated[Literal["forget", "keep"], Allowed("text", "forget or keep")] = Field(
        "forget", description="Whether a flush of SGLang's cache makes lwkv forget: the weights may be new."
    )

    @property
    def why_raw_pages(self) -> str | None:
        return "lossless was not measured in SGLang"

    @property
    def forgets(self) -> bool:
        return self.on_flush == "forget"

    def _more_conflicts(self) -> Iterator[Conflict]:
        if self.page_size and self.chunk_size != self.page_size:
            yield (
                ("chunk_size",),
                f"SGLang's page is {self.page_size} tokens, and it gives lwkv pages one by one, from "
                f"anywhere in a prompt: allowed is {self.page_size}; leave it out, or change --page-size",
            )
        if not self.use_layerwise:
            yield ("use_layerwise",), "SGLang's pool waits for each layer: allowed is true; leave it out"
        if not self.local_cpu:
            yield ("local_cpu",), "SGLang loads only what is in host memory: allowed is true; leave it out"
        if self.save_unfull_chunk:
            yield ("save_unfull_chunk",), "SGLang caches whole pages: allowed is false; leave it out"
        if self.enable_blending:
            advice = (
                "SGLang's models cannot recompute some tokens of a prompt: allowed is false; leave it out"
            )
            yield ("enable_blending",), advice


def read_settings(extra: Mapping[str, object], page_size: int) -> Settings:
    """Merge file, environment and `extra`, the strongest; `page_size` is SGLang's, in tokens.

    Raises:
        ConfigError: as Config, and for what cannot work in SGLang.
    """

    class SettingsOfPages(Settings):
        pass

    SettingsOfPages.page_size = page_size
    arguments = dict(extra)
    if Settings.sources(None, **extra)["chunk_size"] == "default":
        arguments["chunk_size"] = page_size
    return SettingsOfPages.load(None, **arguments)
