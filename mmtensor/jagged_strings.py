"""Strings and bytes as jagged uint8, decoded when they are read."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mmtensor.jagged_layout import Integers, row_number

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

    It goes to other processes as the jagged tensor does.

    Parameters
    ----------
    elements
        The jagged tensor.
    """

    __slots__ = ("_at", "_elements", "_first", "_length", "_memory", "_step")

    def __init__(self, elements: Any) -> None:
        self._elements = elements
        # What self[i] needs, at hand.
        self._memory: memoryview = elements._bytes()
        self._at: Any = elements._at
        self._first: int = elements._first
        self._step: int = elements._step
        self._length: int = len(elements)

    def __reduce__(self) -> tuple[Any, ...]:
        return Strings, (self._elements,)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        number = row_number(index)
        if number is None:
            return Strings(self._elements[index])
        try:
            row = range(self._length)[number]
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
