"""Page-locked host memory, cut into pages."""
