"""The owner: it has the pages and the index of a node. It never uses a device and never reads a page."""
