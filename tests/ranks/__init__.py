"""Functions on real ranks: bits, strategies, evaluation."""
