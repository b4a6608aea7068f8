"""Starting ranks, watching them, and saying how it ended."""
