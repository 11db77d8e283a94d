"""Blends: their time, and the questions that show their quality."""
