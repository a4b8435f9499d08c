"""torch's DistributedDataParallel, with its name and arguments, over the Reducer."""
