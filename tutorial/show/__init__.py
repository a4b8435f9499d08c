"""Prints and draws what the programs measure: one file for each program, one function in each.

The programs contain what a chapter teaches, and these files the rest.
"""
