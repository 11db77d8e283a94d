"""Disk and remote tiers, and what reads and writes the same bytes with nothing else to do."""
