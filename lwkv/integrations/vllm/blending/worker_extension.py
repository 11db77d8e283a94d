"""For `--worker-extension-cls lwkv.integrations.vllm.blending.worker_extension.NoteModel`.

vLLM imports the class in every worker before it loads the model. So blending works where lwkv is on the path
but not installed, and its plug-in does not run.
"""

from __future__ import annotations

from importlib.util import find_spec

from lwkv.integrations.vllm.blending.model.model_finder import watch


class NoteModel:
    """Adds nothing to vLLM's worker."""


if find_spec("vllm") is not None:
    watch()
