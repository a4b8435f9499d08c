"""Programs that measure; each prints a table and writes JSON and a picture."""
