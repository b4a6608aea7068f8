"""Tests of pipeline/runs."""
