"""Tests of pipeline/launch."""
