"""A stand-in for LMCache: the public names that the bench uses, over a dictionary."""

__version__ = "9.9"
