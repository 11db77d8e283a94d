"""What an engine registers: its KV tensors, described by shape, strides and spec."""
