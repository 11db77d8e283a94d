"""What is cached of a prompt, where, and how much of it is worth loading."""
