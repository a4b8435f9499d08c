"""Shared by the benchmarks: options and ranks, pictures, a wire."""
