"""The forward pass of a blend, over a few rows of each prompt."""
