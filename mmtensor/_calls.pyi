from typing import Any, TypeVar

_M = TypeVar("_M", bound=Memory)

class Memory:
    address: int
    nbytes: int
    descriptor: int
    readonly: bool
    keys: list[Any] | None
    entry: Any
    st_dev: int
    st_ino: int
    st_size: int
    st_ctime_ns: int
    def __init__(self, address: int, nbytes: int, base: int, length: int, /) -> None: ...
    @property
    def hold(self) -> Any: ...

def open_map(
    kind: type[_M],
    path: str,
    flags: int,
    protection: int,
    map_flags: int,
    offset: int,
    nbytes: int,
    size: int,
    directory: int,
    handle: bytes,
    /,
) -> _M | None: ...
def create_map(
    kind: type[_M], path: str, address: int, nbytes: int, directory: int, /
) -> _M | None: ...
def size_at(path: str, memory: Memory, /) -> int: ...
def find_live(reference: tuple[Any, ...], /) -> Any: ...
def handle_at(path: str, /) -> bytes: ...
def forget_in(live_mappings: dict[Any, Any], /) -> None: ...
