"""Helpers for whole numbers."""


def is_power_of_two(number: int) -> bool:
    """True for 1, 2, 4, 8 and so on."""
    return number > 0 and number.bit_count() == 1
