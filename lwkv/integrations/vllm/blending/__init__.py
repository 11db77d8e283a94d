"""Blending inside vLLM: segments come from the cache wherever a prompt has them, and some rows are computed.

The scheduler's half (`planner.py`) finds a prompt's segments and which of them are cached, claims their
tokens and sends orders. A worker's half (`worker.py`) carries them out before vLLM's own forward pass: it
loads the segments into the request's blocks and calls the layers of vLLM's model for the rows to compute
(`layers.py`). Nothing of vLLM is changed, but its model is noted when it is loaded (`model_finder.py`).
"""
