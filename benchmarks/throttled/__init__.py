"""The pipeline with a tier and a model whose times are known."""
