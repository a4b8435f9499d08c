"""The same bits on any number of ranks."""
