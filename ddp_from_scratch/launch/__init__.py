"""Starts ranks, watches them, and ends them together."""
