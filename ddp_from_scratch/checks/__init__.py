"""Raises or reports where a step would be wrong, or waits for long."""
