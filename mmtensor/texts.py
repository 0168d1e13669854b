"""Strings of a container on files or in shared memory: a list that says why it does not change."""

from typing import Any, NoReturn

from mmtensor.errors import LockedError

__all__ = ["LockedTexts", "is_texts"]


def is_texts(value: Any) -> bool:
    """Whether a value is a list or tuple of strings."""
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise LockedError(
        "these strings are part of a TensorDict that is memory-mapped or shared, whose text "
        "cannot be written in place: nobody else would see it. Take list(strings), or replace "
        "them: td.unlock_().set(key, strings)."
    )


class LockedTexts(list[str]):
    """A list of strings that refuses to be changed, as its slices do; copies are plain lists."""

    __slots__ = ()

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return LockedTexts(found) if type(found) is list else found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return LockedTexts, (list(self),)

    def __copy__(self) -> list[str]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[str]:
        return list(self)
