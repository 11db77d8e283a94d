"""How fast vLLM computes and tiers are read, as measured while it runs."""
