"""Checks that averages will be right."""
