"""Synchronises parameters, buffers, weights and batch norm over ranks, and compares ranks."""
