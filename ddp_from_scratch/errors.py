"""The one exception that a user's mistake raises, so that it can be told from a bug."""


class UsageError(ValueError):
    """A value that the user gave, or a machine that cannot do what was asked.

    Its text is one line that names the value, what was expected and what to do. The command line
    prints that line alone, without a traceback, and exits with code 2.
    """


class PeerError(UsageError):
    """Another rank has the mistake and reports it; this rank ends in silence."""
