"""Worker processes that are started for one job, and end with it.

`concurrent.futures.ProcessPoolExecutor` would do, and takes twice as long to start and stop:
its queues need a thread or a lock each, and it learns of the death of a worker, not of which
task that was about. Here every worker has a pipe of its own and one task at a time.
"""

import os
from multiprocessing import connection, parent_process, util
from multiprocessing.context import BaseContext
from signal import SIGINT, signal
from threading import Thread
from typing import Any

import numpy as np
import torch

from mmtensor.jobs import FAILED, Job, Outcome, Task, WorkerLost, portable

__all__ = ["Pool"]


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
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._busy: dict[Any, Task] = {}
        # In time for the end of the interpreter, which waits for processes.
        self._finalizer = util.Finalize(
            self, _kill, args=(self._processes, self._pipes), exitpriority=100
        )
        forked = context.get_start_method() == "fork"
        try:
            for number in range(workers):
                near, far = context.Pipe()
                self._pipes.append(near)
                process = context.Process(  # type: ignore[attr-defined]  # every context has it
                    target=_worker,
                    args=(far, list(self._pipes) if forked else [], job),
                    name=f"mmtensor-map-{number}",
                )
                process.start()
                far.close()
                self._processes.append(process)
        except BaseException:
            self.stop(kill=True)
            raise
        self._idle = list(self._pipes)

    def submit(self, task: Task) -> None:
        """Give a task to a worker that has none."""
        pipe = self._idle.pop()
        self._busy[pipe] = task
        try:
            pipe.send((task.first, task.last))
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
                    outcome = pipe.recv()
                except (EOFError, ConnectionResetError):
                    at = self._pipes.index(pipe)
                    raise self._lost(at) from None
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
        return WorkerLost(f"worker process {process.pid} {how}", self._busy.get(self._pipes[at]))

    def stop(self, *, kill: bool) -> None:
        """End all workers and wait for them; kill them where they may be busy."""
        if kill:
            self._finalizer()
            return
        self._finalizer.cancel()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
            process.close()


def _kill(processes: list[Any], pipes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join()
        process.close()


def _worker(pipe: Any, others: list[Any], job: Job) -> None:
    """Do what comes through a pipe, until its other end is closed."""
    for other in others:
        other.close()
    # More threads than processors make everything slower, and those of OpenMP may be in any
    # state after a fork.
    torch.set_num_threads(1)
    np.random.seed()  # noqa: NPY002  # forked workers have all the same state
    # Ctrl-C reaches every process of a terminal. The one that called `map` ends its workers;
    # what they have started gets the signal as usual, which it would not if it was ignored.
    signal(SIGINT, _leave_it)
    Thread(target=_end_with_parent, name="mmtensor-parent", daemon=True).start()
    while True:
        try:
            first, last = pipe.recv()
        except (EOFError, OSError):
            return
        outcome = job.run(first, last)
        try:
            pipe.send(outcome)
        except BrokenPipeError:
            return
        except Exception as error:  # noqa: BLE001  # whatever cannot be pickled
            unsent = TypeError(f"what it returned cannot be sent: {error}")
            pipe.send(Outcome(FAILED, 0.0, portable(unsent), first))


def _leave_it(number: int, frame: Any) -> None:
    pass


def _end_with_parent() -> None:
    """End this worker when the process that has started it ends, however that ends."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
