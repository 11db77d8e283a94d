"""`lwkv bench`: its command, its parts by name, and what a run found."""
