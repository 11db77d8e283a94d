"""Tiers on servers."""
