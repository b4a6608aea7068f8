"""Tests of pipeline/hardware."""
