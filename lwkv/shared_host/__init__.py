"""One host memory for a node: an owner process has the pages and the index, engines map and copy them.

`owner` is what runs in that process, `client` what an engine has of it; both know the rest.
"""
