"""Models and tokenizers from files."""
