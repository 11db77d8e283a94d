"""What plugs lwkv into serving engines: the only place that may import these."""
