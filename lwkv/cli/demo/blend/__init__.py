"""`lwkv blend-demo`: three documents that a small model has cached one by one, asked in another order."""
