from typing import Any, TypeAlias

# Arrays are what has the buffer protocol; stubs of NumPy before 2.4 do not say that theirs do.
Array: TypeAlias = Any

INTERFACE: int

def copy_rows(target: int, source: int, ids: int, count: int, row: int, rows: int, /) -> bool: ...
def look_up(
    total: int,
    ids: Array,
    offsets: Array,
    shapes: Array,
    starts: Array,
    picked_offsets: Array,
    picked_shapes: Array,
    /,
) -> bool: ...
def copy_ranges(
    target: int, room: int, itemsize: int, source: Array, starts: Array, offsets: Array, /
) -> bool: ...
