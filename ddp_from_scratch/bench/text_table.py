"""A table in plain text; no package, so that it is there on every machine that is measured."""

from collections.abc import Sequence


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; a line under the headers.

    Args:
        headers: one for each column.
        rows: as many texts as there are headers, in each.
    """
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(len(text) for text in column) for column in columns]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            text.rjust(width) if place else text.ljust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
