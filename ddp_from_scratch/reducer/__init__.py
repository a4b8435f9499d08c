"""Averages a module's gradients over ranks, in buckets, while backward runs."""
