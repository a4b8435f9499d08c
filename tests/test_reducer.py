"""The Reducer on real ranks: exact averages, launched in order, and loud where it could drift."""
