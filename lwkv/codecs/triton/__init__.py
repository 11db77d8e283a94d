"""Page codecs in Triton."""
