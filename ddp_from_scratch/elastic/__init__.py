"""The same bits on any number of ranks: shards of a batch, and their sum along a fixed tree."""
