"""Where the time of one move goes: `python -m lwkv.benchmarks.move_trace`."""
