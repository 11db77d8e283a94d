"""What a user may set: settings, where they come from, and what is said about wrong ones."""
