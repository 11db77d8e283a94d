"""Loads and saves beside a model that computes."""
