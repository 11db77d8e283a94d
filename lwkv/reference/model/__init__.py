"""The model of the reference engine: its shape, its weights, its layers."""
