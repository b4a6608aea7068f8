"""This machine: what it computes with, where ranks go on it, and its network."""
