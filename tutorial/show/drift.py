"""Prints and draws chapter 8: how far the ranks of each program are apart."""

from tutorial import pictures


def show(found, path):
    """Shows `{program: (distance after each step, what check_sync says)}`."""
    print("after step          1       10       40")
    for name, (distances, _) in found.items():
        print(f"{name:<16}" + "".join(f"{distances[step - 1]:9.0e}" for step in (1, 10, 40)))
    print()
    for name, (_, message) in found.items():
        print(f"{name}:\n    {message}")
    curves = {
        name: (range(1, len(distances) + 1), distances) for name, (distances, _) in found.items()
    }
    title = "largest distance of a parameter or buffer from rank 0's"
    pictures.lines(path, title, "step", "", {}, curves)
