"""Messages between a process and its workers, with blocks of shared memory in them.

`multiprocessing` passes descriptors through a server in the sender, which takes 5 ms to start in
a process that was just forked, and 0.5 ms for each. A pipe to a worker is a socket, which takes
descriptors along with the message.
"""

import copyreg
import io
import os
import pickle
import socket
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler, recvfds, sendfds
from typing import Any

from mmtensor.shared_memory import SharedMapping

__all__ = ["Message", "receive", "send"]

_SOCKETS = os.name == "posix" and hasattr(socket, "SCM_RIGHTS")
# Descriptors in one message of a socket: 253 on Linux.
_TOGETHER = 250

# The dispatch table of a ForkingPickler, which copies two hundred entries for each message and
# so touches as many types: in a worker that was forked, pages that are copied.
_registered: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # not in typeshed
_by_default: Any = copyreg.dispatch_table
_dispatch_table: Any = ChainMap(_registered, _by_default)


class _Pickler(pickle.Pickler):
    """Leaves blocks out, and notes their descriptors."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = _dispatch_table
        self.blocks: list[SharedMapping] = []

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not SharedMapping:
            return None
        self.blocks.append(value)
        return len(self.blocks) - 1, value.nbytes, value.offset


class _Unpickler(pickle.Unpickler):
    """Puts blocks in, on the descriptors that came."""

    def __init__(self, file: Any, fds: list[int]) -> None:
        super().__init__(file)
        self.fds = fds

    def persistent_load(self, described: Any) -> SharedMapping:
        number, nbytes, offset = described
        fd, self.fds[number] = self.fds[number], -1
        return SharedMapping.adopt(fd, nbytes, offset)


def _socket(pipe: Any) -> socket.socket:
    channel = socket.socket(fileno=os.dup(pipe.fileno()))
    channel.setblocking(True)  # it is not where the program has set a default timeout
    return channel


def send(pipe: Any, message: Any) -> None:
    """Send a message through a pipe."""
    if not _SOCKETS:
        pipe.send(message)  # by ForkingPickler, as _Unpickler reads it
        return
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(message)
    blocks = pickler.blocks
    pipe.send_bytes(len(blocks).to_bytes(4, "little") + buffer.getbuffer())
    if not blocks:
        return
    with _socket(pipe) as channel:
        for start in range(0, len(blocks), _TOGETHER):
            sendfds(channel, [block.fd for block in blocks[start : start + _TOGETHER]])


def _received(channel: socket.socket, count: int) -> list[int]:
    try:
        return recvfds(channel, count)
    except RuntimeError as error:  # fewer than were sent
        raise RuntimeError(
            f"cannot receive {count} blocks of shared memory: this process has no descriptors "
            "left. Allow more (ulimit -n), or hold fewer results at a time."
        ) from error


class Message:
    """What has come through a pipe: bytes, and descriptors of blocks that they speak of."""

    def __init__(self, data: memoryview, fds: list[int]) -> None:
        self._data = data
        self._fds = fds

    def load(self) -> Any:
        """Make of it what was sent, once; whatever that raises, no descriptor is left."""
        fds = self._fds
        try:
            return _Unpickler(io.BytesIO(self._data), fds).load()
        finally:
            _close(fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def receive(pipe: Any) -> Message:
    """Wait for a message.

    Raises
    ------
    EOFError, OSError
        If the other end is closed.
    RuntimeError
        If there are not enough descriptors for it.
    """
    data = memoryview(pipe.recv_bytes())
    if not _SOCKETS:
        return Message(data, [])
    count = int.from_bytes(data[:4], "little")
    fds: list[int] = []
    try:
        if count:
            with _socket(pipe) as channel:
                for start in range(0, count, _TOGETHER):
                    fds += _received(channel, min(_TOGETHER, count - start))
        for fd in fds:
            os.set_inheritable(fd, False)
    except BaseException:
        _close(fds)
        raise
    return Message(data[4:], fds)
