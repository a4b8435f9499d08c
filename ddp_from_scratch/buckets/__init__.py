"""Buckets: the memory that gradients are packed into, and its layout."""
