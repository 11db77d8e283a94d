"""vLLM's own model, called layer by layer, and what is tried with it at the start."""
