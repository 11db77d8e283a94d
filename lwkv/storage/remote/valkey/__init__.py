"""The tier on Valkey and Redis servers."""
