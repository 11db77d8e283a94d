"""What lwkv's speed is, measured: `lwkv bench`, or `python -m lwkv.benchmarks`."""
