"""Counters, logs and the timeline of a forward pass."""
