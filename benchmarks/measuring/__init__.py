"""What all benchmarks use: an engine to measure, shapes, times, and processes of their own."""
