"""What a run must survive, done for real."""
