"""Strings and bytes as jagged uint8, decoded when they are read."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mmtensor.jagged_layout import Integers

__all__ = ["Strings", "encoded"]


def encoded(strings: Iterable[str | bytes]) -> tuple[Integers, list[bytes]]:
    """Return the shapes and the bytes of strings: UTF-8, or bytes as they are.

    Raises
    ------
    TypeError
        It names the first element that is neither.
    """
    if isinstance(strings, (str, bytes)):
        raise TypeError(f"expected a list of strings, got one: {strings!r}.")
    try:
        pieces = [
            item.encode() if isinstance(item, str) else bytes(item) for item in _checked(strings)
        ]
    except UnicodeEncodeError as error:
        raise ValueError(f"a string has no UTF-8 form: {error}") from None
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    return lengths.reshape(-1, 1), [b"".join(pieces)]


def _checked(strings: Iterable[Any]) -> Iterator[Any]:
    for number, item in enumerate(strings):
        if not isinstance(item, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"element {number} must be a str or bytes, got {type(item)!r}.")
        yield item


class Strings(Sequence[str]):
    """The elements of a jagged tensor of bytes as str: see `JaggedTensor.strings`.

    Parameters
    ----------
    memory
        The bytes of all values.
    at
        The offsets.
    first, step, length
        Which elements: `first`, `first + step` and so on.
    """

    __slots__ = ("_at", "_first", "_length", "_memory", "_step")

    def __init__(self, memory: memoryview, at: Any, first: int, step: int, length: int) -> None:
        self._memory, self._at = memory, at
        self._first, self._step, self._length = first, step, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            chosen = range(self._length)[index]
            first = self._first + chosen.start * self._step
            return Strings(self._memory, self._at, first, self._step * chosen.step, len(chosen))
        try:
            row = range(self._length)[index]
        except IndexError:
            raise IndexError(
                f"element {index} is out of range for {self._length} elements."
            ) from None
        row = self._first + row * self._step
        return str(self._memory[self._at[row] : self._at[row + 1]], "utf-8")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "strings of a jagged tensor are read-only: another length would move all that "
            'follow. Replace them all: td["name"] = [...], or JaggedTensor.from_strings([...]).'
        )

    def _pieces(self) -> Iterator[memoryview]:
        at, memory, step = self._at, self._memory, self._step
        for number in range(self._length):
            row = self._first + number * step
            yield memory[at[row] : at[row + 1]]

    def decode_all(self) -> list[str]:
        """Return all of them as a list."""
        return [str(piece, "utf-8") for piece in self._pieces()]

    def encoded_all(self) -> list[bytes]:
        """Return all of them as a list of bytes."""
        return [bytes(piece) for piece in self._pieces()]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:5]))
        return f"Strings([{shown}{', ...' if self._length > 5 else ''}], len={self._length})"
