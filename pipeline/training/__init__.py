"""What a rank runs."""
