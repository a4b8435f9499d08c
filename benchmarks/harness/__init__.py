"""Shared by the benchmarks: contenders, workloads, timing, reports."""
