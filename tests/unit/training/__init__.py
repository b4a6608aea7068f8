"""Tests of pipeline/training."""
