"""Models whose layers keep different things: several groups of caches, each with a block table of its own."""
