"""Steps whose bits do not depend on the number of ranks, and jobs that go on without a lost one."""
