"""The disk tier: one file a chunk."""
