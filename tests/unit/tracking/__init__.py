"""Tests of pipeline/tracking."""
