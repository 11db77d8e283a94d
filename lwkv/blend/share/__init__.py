"""Which share of the reused tokens is computed again, by what was measured before."""
