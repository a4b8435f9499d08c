"""Makes ranks equal, and finds out where they are not."""
