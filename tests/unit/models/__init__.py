"""Tests of pipeline/models."""
