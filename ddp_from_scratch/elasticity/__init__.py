"""The same bits on any number of ranks, and runs that go on without a lost one."""
