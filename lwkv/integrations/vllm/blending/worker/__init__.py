"""A worker's half of blending: one step's orders, and one prompt's pass over the layers."""
