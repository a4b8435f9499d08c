"""Errors, GPUs, process groups and memory: what every other folder uses."""
