"""Exceptions that say whose mistake it is: the user's, another rank's, or nobody's here."""


class UsageError(ValueError):
    """A value that the user gave, or a machine that cannot do what was asked.

    Its text is one line that names the value, what was expected and what to do. The command line
    prints that line alone, without a traceback, and exits with code 2.
    """


class PeerError(UsageError):
    """Another rank has the mistake and reports it; this rank ends without a message."""


class CommunicationError(RuntimeError):
    """An operation failed or did not end in time: as a rule because of a rank that has gone."""


class NoSharedMemory(CommunicationError):
    """The ranks of a machine have no room for memory that they share."""
