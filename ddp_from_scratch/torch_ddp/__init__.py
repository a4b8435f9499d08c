"""torch's DistributedDataParallel by name and arguments, over the Reducer."""
