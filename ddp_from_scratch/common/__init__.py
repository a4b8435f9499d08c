"""Errors, GPUs, process groups and memory: what every room uses."""
