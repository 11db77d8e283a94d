"""What lwkv's speed is, measured: `lwkv bench`."""
