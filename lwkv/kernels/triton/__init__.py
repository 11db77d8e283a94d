"""Gather and scatter in Triton."""
