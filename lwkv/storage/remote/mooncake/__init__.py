"""The tier on a Mooncake Store."""
