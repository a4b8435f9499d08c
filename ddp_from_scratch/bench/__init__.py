"""Times training steps of any model, with this library and with torch's DistributedDataParallel."""
