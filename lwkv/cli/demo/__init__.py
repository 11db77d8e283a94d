"""`lwkv demo`: a small model answers from a document whose KV cache is saved and loaded layer by layer."""
