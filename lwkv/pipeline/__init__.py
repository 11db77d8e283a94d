"""One batch, in both directions: retrieve and store, layer by layer."""
