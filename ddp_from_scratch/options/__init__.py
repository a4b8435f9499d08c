"""One option of a Reducer in each file."""
