"""Threads that work beside the engine, and how they end."""
