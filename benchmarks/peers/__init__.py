"""Other libraries, measured beside lwkv."""
