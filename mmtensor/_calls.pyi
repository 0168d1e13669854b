from typing import Any, TypeVar

from typing_extensions import Buffer

_M = TypeVar("_M", bound=Memory)

INTERFACE: int

class Memory(Buffer):
    descriptor: int
    readonly: bool
    st_dev: int
    st_ino: int
    st_ctime_ns: int
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def keys(self) -> list[Any] | None: ...
    @property
    def entry(self) -> Any: ...
    @property
    def hold(self) -> Any: ...
    @property
    def writeable(self) -> Buffer: ...
    def place(self, address: int, nbytes: int, /) -> None: ...
    def map_bytes(
        self, fd: int, offset: int, nbytes: int, protection: int, map_flags: int, /
    ) -> None: ...
    def found_under(self, table: dict[Any, Any], key: Any, entry: Any, /) -> None: ...

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
    kind: type[_M], path: str, address: int, nbytes: int, reserve: bool, directory: int, /
) -> _M | None: ...
def size_at(path: str, memory: Memory, /) -> int: ...
def find_live(live_mappings: dict[Any, Any], reference: tuple[Any, ...], /) -> Any: ...
def handle_at(path: str, /) -> bytes: ...
