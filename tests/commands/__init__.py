"""Every command as a user runs it."""
