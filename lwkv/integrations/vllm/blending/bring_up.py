"""Makes the two halves of blending from vLLM's configuration, and tries once whether they can work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lwkv.blend.forward.attention import choose_attend_paged
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.segment_cache import SegmentCache
from lwkv.blend.selector import Deviation, configured_selector
from lwkv.blend.share.batch_shares import Shares
from lwkv.blend.share.controller import LoadingController
from lwkv.connectors.rope import Rope
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.blending.model.check import StartCheck
from lwkv.integrations.vllm.blending.model.model_finder import loaded_model
from lwkv.integrations.vllm.blending.model.row_attention import RowAttentions, is_plain
from lwkv.integrations.vllm.blending.refusals import refuse_backend
from lwkv.integrations.vllm.blending.scheduler.plan import BlendSizes
from lwkv.integrations.vllm.blending.scheduler.planner import BlendPlanner
from lwkv.integrations.vllm.blending.scheduler.prompt_segments import PromptSegments
from lwkv.integrations.vllm.blending.scheduler.segment_tiers import SegmentTiers
from lwkv.integrations.vllm.blending.tokenizer import encoder, find_separator, prefix_ids
from lwkv.integrations.vllm.blending.worker.ranks import Ranks
from lwkv.integrations.vllm.blending.worker.share import ControlledShare
from lwkv.integrations.vllm.blending.worker.side import BlendWorker
from lwkv.integrations.vllm.scheduler.lookup.parts import LookUpParts
from lwkv.integrations.vllm.settings import Settings
from lwkv.integrations.vllm.worker.caches import layer_specs, only_group
from lwkv.reference.model.rope import inverse_frequencies
from lwkv.reference.model_files.hf_folder import shape_from_config

if TYPE_CHECKING:
    from lwkv.integrations.vllm.blending.model.layers import ModelLayers

log = logging.getLogger(__name__)

FARTHEST = 4096
"""Up to this position it is tried whether keys can be moved."""


def make_planner(settings: Settings, vllm_config: Any, group: Any, parts: LookUpParts) -> BlendPlanner:
    """The scheduler's half. Raises ConfigError."""
    encode = encoder(vllm_config.model_config)
    num_layers = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
    share = settings.blend_plan[-1][1]
    sizes = BlendSizes(
        block_size=int(group.kv_cache_spec.block_size),
        chunk_size=settings.chunk_size,
        min_tokens=settings.blend_min_tokens,
        most_rows=int(vllm_config.scheduler_config.max_num_batched_tokens),
        full_layers=full_layers(settings, num_layers) / num_layers if share else 0.0,
        share=share,
        asks=asks(settings),
        in_parts=settings.blend_in_parts,
    )
    prefix = prefix_ids(settings, encode)
    find = PromptSegments(find_separator(settings, encode))
    tiers = SegmentTiers(
        parts.index, parts.waiting, parts.look_ups, settings.chunk_size, prefix, parts.fetches
    )
    return BlendPlanner(sizes, find, prefix, tiers, parts.counters, settings.load_timeout_s, parts.clock)


def make_blend_worker(
    engine: CacheEngine, settings: Settings, vllm_config: Any, kv_cache_config: Any, ranks: Ranks
) -> BlendWorker:
    """A worker's half, for the model that vLLM has loaded in this process.

    Raises:
        ConfigError: a model that was not seen, whose layers cannot be called, or give other results so.
    """
    model = _seen(loaded_model(vllm_config))
    segments = SegmentCache(engine, prefix_ids(settings, encoder(vllm_config.model_config)))
    rows = PagedRows(segments.connector)
    layers, block_size = _layers(model, engine, vllm_config, kv_cache_config, rows)
    selector = configured_selector(settings.blend_selector, settings.blend_plan, layers.num_layers)
    rope = model_rope(vllm_config.model_config)
    segments.connector.set_rope(rope)
    far = min(int(vllm_config.model_config.max_model_len) - 1, FARTHEST)
    StartCheck(model, layers, rows, block_size, rope, far, asks(settings)).run()
    log.info(
        "prompts are blended: the layers of %s were tried; %s of the reused tokens are chosen by %s, and "
        "segments are computed behind %d tokens",
        *(type(model).__name__, settings.blend_plan[-1][1], selector, len(segments.shared_prefix)),
    )
    share, counters = settings.blend_plan[-1][1], engine.parts().counters
    controlled = _controlled(engine, settings, vllm_config, layers.num_layers, ranks)
    return BlendWorker(segments, layers, selector, share, block_size, counters, ranks, controlled)


def _controlled(
    engine: CacheEngine, settings: Settings, vllm_config: Any, num_layers: int, ranks: Ranks
) -> ControlledShare | None:
    """What chooses how many tokens are computed; None where it is always as many."""
    least = settings.blend_plan[-1][1]
    # Ranks measure other speeds, and have to compute the same rows.
    if not settings.blend_more_while_loading or not least or ranks.are_several:
        return None
    connector, counters = engine.connector, engine.parts().counters
    shares = Shares(least, LoadingController(least), connector.platform, connector.device, counters)
    most_rows = int(vllm_config.scheduler_config.max_num_batched_tokens)
    return ControlledShare(shares, num_layers, full_layers(settings, num_layers), most_rows)


def asks(settings: Settings) -> bool:
    """Whether tokens are chosen by what a question looks at."""
    return settings.blend_selector == "query" and settings.blend_plan[-1][1] > 0


def full_layers(settings: Settings, num_layers: int) -> int:
    """In how many of the model's layers all reused tokens are computed.

    By deviation, all layers in front of the last check layer. Where a question cannot be asked, deviation
    chooses.
    """
    if settings.blend_selector == "prefix_k":
        return 0
    last = settings.blend_plan[-1][0] if settings.blend_selector == "deviation" else Deviation().layers[-1]
    return min(last, num_layers)


def _seen(model: Any) -> Any:
    if model is None:
        raise ConfigError(
            "enable_blending: the model was not seen when vLLM loaded it; install lwkv, so that its plug-in "
            "runs, or start vLLM with --worker-extension-cls "
            "lwkv.integrations.vllm.blending.worker_extension.NoteModel; or set enable_blending to false"
        )
    return model


def _layers(
    model: Any, engine: CacheEngine, vllm_config: Any, kv_cache_config: Any, rows: PagedRows
) -> tuple[ModelLayers, int]:
    """The model's layers, and the tokens of a block."""
    from lwkv.integrations.vllm.blending.model.layers import ModelLayers

    names = [layer.name for layer in engine.connector.layers]
    spec = layer_specs(only_group(kv_cache_config))[names[0]]
    if engine.connector.layers[0].k.shape[1] != spec.block_size:
        raise ConfigError("enable_blending: attention cuts vLLM's blocks; set enable_blending to false")
    limits, device = vllm_config.scheduler_config, engine.connector.device
    most = int(limits.max_num_batched_tokens), int(limits.max_num_seqs)
    decoder = _decoder(model, names, vllm_config)
    by_rows = _row_attentions(engine, vllm_config, names)
    layers = ModelLayers(decoder, vllm_config, names, spec, device, *most, rows.send, by_rows)
    return layers, int(spec.block_size)


def _row_attentions(engine: CacheEngine, vllm_config: Any, names: list[str]) -> RowAttentions | None:
    """lwkv's kernel for all layers, where the device and the layers' attention allow it."""
    attend, caches = choose_attend_paged(engine.connector.platform), engine.connector.layers
    known = vllm_config.compilation_config.static_forward_context
    modules = [known[name] for name in names]
    if attend is None or not all(map(is_plain, modules)):
        return None
    return RowAttentions(modules, caches, attend)


def model_rope(model_config: Any) -> Rope:
    """How the model turns its keys. Raises ConfigError for a rope that depends on the prompt's length."""
    config = dict(model_config.hf_text_config.to_dict())
    # The rest of these architectures makes no difference to the rope; it is tried at start.
    config |= {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "use_sliding_window": False}
    config |= dict.fromkeys(("attention_bias", "mlp_bias", "quantization_config", "sliding_window"))
    config.setdefault("intermediate_size", 1)
    config.setdefault("rms_norm_eps", 1e-6)
    return Rope(tuple(inverse_frequencies(shape_from_config(config)).tolist()))


def _decoder(model: Any, names: list[str], vllm_config: Any) -> Any:
    """What has the layers; each has one attention, in the order of the caches."""
    decoder: Any = getattr(model, "model", None)
    missing = [name for name in ("layers", "norm", "embed_input_ids") if not hasattr(decoder, name)]
    if missing:
        raise ConfigError(
            f"enable_blending: {type(model).__name__} is built in another way than Llama: it lacks "
            f"{', '.join(f'model.{name}' for name in missing)}; set enable_blending to false"
        )
    known = vllm_config.compilation_config.static_forward_context
    for name in names:
        refuse_backend(known[name].get_attn_backend().get_name())
    places = {id(part): number for number, layer in enumerate(decoder.layers) for part in layer.modules()}
    if [places.get(id(known[name])) for name in names] != list(range(len(decoder.layers))):
        raise ConfigError(
            f"enable_blending: the {len(decoder.layers)} layers of {type(model).__name__} do not have one of "
            f"its {len(names)} caches each, in order; set enable_blending to false"
        )
    return decoder
