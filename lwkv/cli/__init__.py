"""The `lwkv` command."""
