"""Opens the process group that everything else communicates through."""
