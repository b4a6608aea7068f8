"""Tests of pipeline/compare."""
