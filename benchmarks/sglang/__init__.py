"""What runs in the processes of `sglang_ttft`, and tables of what was found."""
