"""`lwkv doctor`: what is installed, which platform is used and why, how fast its link is."""
