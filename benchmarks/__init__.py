"""Programs that measure; each prints a table and writes every sample as JSON."""
