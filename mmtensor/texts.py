"""Strings of a container that stands on files: a list that says why it does not change."""

from typing import Any, NoReturn

from mmtensor.errors import LockedError

__all__ = ["LockedTexts", "is_texts"]


def is_texts(value: Any) -> bool:
    """Whether a value is a list or tuple of strings."""
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise LockedError(
        "these strings are part of a memory-mapped TensorDict, whose text cannot be written in "
        "place: no file would change. Take list(strings), or replace them: "
        "td.unlock_().set(key, strings)."
    )


class LockedTexts(list[str]):
    """A list of strings that refuses to be changed; copies of it are plain lists."""

    __slots__ = ()

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)

    def __copy__(self) -> list[str]:
        return list(self)
