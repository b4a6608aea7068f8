"""Tests of pipeline.elastic."""
