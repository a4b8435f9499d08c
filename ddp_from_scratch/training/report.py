"""Output of a run: a progress bar and lines, from rank 0 alone."""

import os
import sys
from collections.abc import Iterable

from tqdm import tqdm

from ddp_from_scratch.launch import output


class Report:
    """A progress bar on a terminal, plain lines elsewhere; from the one rank that `speaks`.

    Attributes:
        speaks: as given; another rank may take over.
        colours: True where a person looks at standard output.
    """

    def __init__(self, *, speaks: bool, quiet: bool) -> None:
        self.speaks, self._quiet = speaks, quiet
        # Both: mpirun gives every rank a terminal of its own as standard output.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self.colours = terminal and "NO_COLOR" not in os.environ

    @property
    def _verbose(self) -> bool:
        return self.speaks and not self._quiet

    def progress(self, steps: range, title: str) -> Iterable[int]:
        """Passes `steps` through, and shows how far they are on a terminal."""
        return tqdm(
            steps,
            total=steps.stop,
            initial=steps.start,
            desc=title,
            unit="step",
            leave=False,
            # On standard error, so that the output of a run can be piped. Under mpirun, too:
            # standard error, a pipe there, has become the terminal that a person watches
            # (`write_to_terminal`).
            disable=not (self._verbose and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def line(self, text: str) -> None:
        """Prints a line of a run's course."""
        if self._verbose:
            # Takes the bar away meanwhile.
            with tqdm.external_write_mode(file=sys.stdout):
                output.write(text, sys.stdout)

    def warning(self, text: str) -> None:
        """Prints a warning, also when quiet."""
        if self.speaks:
            output.write(f"warning: {text}", sys.stderr)

    def result(self, text: str) -> None:
        """Prints the run's result, also when quiet."""
        if self.speaks:
            output.write(text, sys.stdout)
