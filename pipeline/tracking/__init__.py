"""What happened: the journal, its mirror in MLflow, and the receipt."""
