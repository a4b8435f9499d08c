"""A class that derives from another for `isinstance` alone."""

from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def derives_in_name_alone(theirs: type, ours: Class) -> Class:
    """Takes from `ours` all that it would inherit from `theirs` itself; changes and returns it.

    Each attribute that `theirs` defines is what it would be if `ours` derived from the bases of
    `theirs` instead, or else there is none. That holds for names that a later version adds, too.
    Names that Python itself reads in a class (`__doc__`, `__annotations__`) are left alone.

    Args:
        theirs: among the bases of `ours`, which defines what it offers itself.
        ours: whose instances are to pass `isinstance(x, theirs)`.
    """
    position = ours.__mro__.index(theirs)
    before, behind = ours.__mro__[:position], ours.__mro__[position + 1 :]
    for name, value in vars(theirs).items():
        of_python = name.startswith("__") and not hasattr(value, "__get__")
        if of_python or any(name in vars(base) for base in before):
            continue
        inherited = (vars(base)[name] for base in behind if name in vars(base))
        setattr(ours, name, next(inherited, _Absent(name)))
    return ours


class _Absent:
    """An attribute that a class does not have, although one of its bases does."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} of {owner.__module__} has no {self._name}")
