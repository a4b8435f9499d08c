"""Checks that averages will be right, and reports steps that stall."""
