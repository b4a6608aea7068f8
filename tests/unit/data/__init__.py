"""Tests of pipeline/data."""
