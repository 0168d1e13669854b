"""Worker processes that are started for one job, and end with it.

`concurrent.futures.ProcessPoolExecutor` would do, and takes twice as long to start and stop:
its queues need a thread or a lock each, and it learns of the death of a worker, not of which
task that was about. Here every worker has a pipe of its own and one task at a time.
"""

import gc
import importlib
import os
import struct
import sys
from multiprocessing import connection, parent_process, util
from multiprocessing.context import BaseContext
from signal import SIGINT, signal
from threading import Lock
from typing import Any

import numpy as np
import torch

from mmtensor.channel import Message, receive, send
from mmtensor.jobs import FAILED, Job, Outcome, Task, WorkerLost, portable
from mmtensor.tensor import MemoryMappedTensor

__all__ = ["Pool"]

# Windows has none, and no forks either.
fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

# A task: the first chunk, before which chunk it ends, and after how many seconds.
_TASK = struct.Struct("=qqd")

# Held while a worker is started. One that was forked in between by another thread would hold
# the wrong ends of its pipes, and neither would notice the end of the other or of the parent.
_starting = Lock()


def _renew_lock() -> None:
    """Forget a lock that another thread held when this process was forked."""
    global _starting
    _starting = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Pool:
    """Processes at work on one job.

    Parameters
    ----------
    job
        What is done. It crosses to each worker once: forked ones are born with it.
    workers
        How many processes.
    context
        How they are started.

    Attributes
    ----------
    capacity : int
        How many tasks may be under way.
    """

    def __init__(self, job: Job, workers: int, context: BaseContext) -> None:
        self.capacity = workers
        self._job = job
        self._context: Any = context
        self._forks = context.get_start_method() == "fork"
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._idle: list[Any] = []
        self._busy: dict[Any, Task] = {}
        # Which chunk each worker is at, in memory that outlives it.
        self._at: Any = MemoryMappedTensor.zeros(workers, dtype=torch.int64)
        self._dismissed = False
        # In time for the end of the interpreter, which waits for processes.
        self._finalizer = util.Finalize(
            self, _kill, args=(self._processes, self._pipes), exitpriority=100
        )

    def _start(self) -> Any:
        """Start a worker; return the pipe to it."""
        with _starting:
            near, far = self._context.Pipe()
            at = self._at[len(self._pipes) :]
            self._pipes.append(near)
            try:
                process = self._context.Process(
                    target=_worker,
                    args=(far, list(self._pipes) if self._forks else [], self._job, at),
                    name=f"mmtensor-map-{len(self._pipes)}",
                )
                process.start()
            finally:
                far.close()
            self._processes.append(process)
        return near

    def submit(self, task: Task) -> None:
        """Give a task to a worker that has none; the first ones start the workers."""
        pipe = self._idle.pop() if self._idle else self._start()
        self._busy[pipe] = task
        try:
            pipe.send_bytes(_TASK.pack(task.first, task.last, task.seconds))
        except OSError:
            pass  # it has died, which `next` finds out

    def next(self) -> tuple[Task, Outcome]:
        """Wait for a task to be done.

        Raises
        ------
        WorkerLost
            If a worker has died.
        """
        sentinels = {process.sentinel: at for at, process in enumerate(self._processes)}
        ready: list[Any] = connection.wait([*self._busy, *sentinels])
        for pipe in ready:
            if not isinstance(pipe, int):
                task = self._busy[pipe]
                try:
                    message = receive(pipe)
                except (EOFError, OSError):  # it may have been in the middle of a message
                    at = self._pipes.index(pipe)
                    raise self._lost(at) from None
                outcome = _read(message, task)
                del self._busy[pipe]
                self._idle.append(pipe)
                return task, outcome
        raise self._lost(sentinels[ready[0]])

    def _lost(self, at: int) -> WorkerLost:
        process = self._processes[at]
        process.join(1)
        code = process.exitcode
        how = "ended" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        task = self._busy.get(self._pipes[at])
        chunk = int(self._at[at])
        known = task is not None and task.first <= chunk < task.last
        return WorkerLost(f"worker process {process.pid} {how}", task, chunk if known else None)

    def dismiss(self) -> None:
        """Tell all workers that there is nothing left to do."""
        self._dismissed = True
        for pipe in self._pipes:
            try:
                pipe.send_bytes(b"")
            except OSError:
                pass  # it has died meanwhile, with nothing to do

    def stop(self, *, kill: bool) -> None:
        """End all workers and wait for them; kill them where they may be busy."""
        self._at = None  # an exception may keep this pool for a while, and a descriptor with it
        if kill:
            self._finalizer()
            return
        self._finalizer.cancel()
        if not self._dismissed:
            self.dismiss()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _read(message: Message, task: Task) -> Outcome:
    """Return what a worker says; a file that it refers to may have been replaced meanwhile."""
    try:
        return message.load()  # type: ignore[no-any-return]  # workers send nothing else
    except Exception as error:  # noqa: BLE001  # it is raised where the map was called
        unread = RuntimeError(f"what it returned cannot be received: {error}")
        unread.__cause__ = error
        return Outcome(FAILED, 0.0, unread, task.first)


def _kill(processes: list[Any], pipes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join()
        process.close()


def _worker(pipe: Any, others: list[Any], job: Job, at: MemoryMappedTensor) -> None:
    """Do what comes through a pipe, until that is nothing."""
    for other in others:
        other.close()
    # A collection would touch, and so copy, every page that is shared with the parent.
    gc.freeze()
    # More threads than processors make everything slower, and those of OpenMP may be in any
    # state after a fork.
    torch.set_num_threads(1)
    # Forked workers have all the same state. NumPy loads it when it is first asked for, which
    # takes 10 ms, and is seeded by the system then.
    if "numpy.random" in sys.modules:
        np.random.seed(int.from_bytes(os.urandom(4), "little"))  # noqa: NPY002
    # Ctrl-C reaches every process of a terminal. The one that called `map` ends its workers;
    # what they have started gets the signal as usual, which it would not if it was ignored.
    signal(SIGINT, _leave_it)
    _end_with_parent()
    place = at.numpy()
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        if not message:
            return
        first, last, seconds = _TASK.unpack(message)
        outcome = job.run(first, last, seconds, place)
        try:
            send(pipe, outcome)
        except BrokenPipeError:
            return
        except Exception as error:  # noqa: BLE001  # whatever cannot be pickled
            unsent = TypeError(f"what it returned cannot be sent: {error}")
            send(pipe, Outcome(FAILED, 0.0, portable(unsent), first))


def _leave_it(number: int, frame: Any) -> None:
    pass


def _end_with_parent() -> None:
    """Let this worker end when the process that has started it ends, however that ends.

    Between tasks it would notice anyway, but not in the middle of one. The sentinel of a
    process is a pipe whose other end its parent holds; the kernel sends SIGIO when that end is
    closed, which ends a process that does not expect it. (A thread that waits for the same
    takes 3 ms to start after a fork.)
    """
    parent = parent_process()
    if fcntl is None or parent is None:
        return
    sentinel = parent.sentinel
    try:
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    except OSError:  # not for pipes on this system
        return
    if not parent.is_alive():
        os._exit(1)
