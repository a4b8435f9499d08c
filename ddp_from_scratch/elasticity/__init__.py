"""Runs that go on without a lost rank."""
