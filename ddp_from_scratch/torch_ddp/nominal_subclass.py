"""Subclasses that pass `isinstance` and inherit nothing."""

from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def derives_in_name_alone(theirs: type, ours: Class) -> Class:
    """Removes from `ours` all that `theirs` itself would pass on; changes and returns `ours`.

    Each attribute that `theirs` defines becomes the attribute that `ours` would have if it derived
    from the bases of `theirs` instead; without one, access raises AttributeError. Instances of
    `ours` still pass `isinstance(x, theirs)`.
    """
    position = ours.__mro__.index(theirs)
    before, behind = ours.__mro__[:position], ours.__mro__[position + 1 :]
    # Not a list of names: torch's later versions add more.
    for name, value in vars(theirs).items():
        # Python itself reads `__doc__`, `__annotations__` and the like in a class.
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
        # Not another error: hasattr() must be False.
        raise AttributeError(f"{owner.__name__} of {owner.__module__} has no {self._name}")
