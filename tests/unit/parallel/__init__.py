"""Tests of pipeline/parallel."""
