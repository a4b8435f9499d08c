"""Memory that the ranks of one machine share, and reductions in it."""
