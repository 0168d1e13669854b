"""Any `concurrent.futures.Executor` at work on one job."""

from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from queue import SimpleQueue
from typing import Any

from mmtensor.jobs import MISSING, Job, Outcome, Task, WorkerLost, run_cached

__all__ = ["Crew", "Inline"]

# Tasks under way for each worker, so that it need not wait for the next one.
_AHEAD = 2


class Inline(Executor):
    """Does each task at once, in the calling thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call the function."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Crew:
    """An executor at work on one job; see `pool.Pool`, which does the same.

    Parameters
    ----------
    job
        What is done.
    executor
        Who does it.
    workers
        For how many workers there is work.
    threads
        Whether they are threads of this process. Others keep a job that a task has brought
        them: it goes with as many tasks as there are workers, and again with each of the first
        tasks that comes to a worker that has not got it.
    waits
        Whether tasks that have begun can be waited for when the others are cancelled.
    """

    def __init__(
        self, job: Job, executor: Executor, workers: int, *, threads: bool, waits: bool
    ) -> None:
        self.job = job
        self.capacity = workers if isinstance(executor, Inline) else _AHEAD * workers
        self._submit = executor.submit
        self._threads = threads
        self._waits = waits
        self._with_job = workers
        self._done: SimpleQueue[Task] = SimpleQueue()
        self._under_way: dict[Task, Future[Outcome]] = {}

    def submit(self, task: Task, *, again: bool = False) -> None:
        """Give a task to the executor.

        Raises
        ------
        WorkerLost
            If the executor is broken.
        """
        job = self.job
        what = task.first, task.last, task.seconds
        try:
            if self._threads:
                future = self._submit(job.run, *what)
            else:
                sent = job if again or self._with_job > 0 else None
                self._with_job -= not again
                future = self._submit(run_cached, job.token, sent, *what)
        except BrokenExecutor as error:
            raise WorkerLost(str(error), None) from error
        self._under_way[task] = future
        future.add_done_callback(lambda _: self._done.put(task))

    def next(self) -> tuple[Task, Outcome]:
        """Wait for a task to be done.

        Raises
        ------
        WorkerLost
            If the executor has lost a worker, or cannot send what there is to send.
        """
        while True:
            task = self._done.get()
            try:
                outcome = self._under_way.pop(task).result()
            except (BrokenExecutor, CancelledError) as error:
                # All tasks are told so; whose fault it was is not known.
                raise WorkerLost(str(error) or type(error).__name__, None) from error
            except Exception as error:
                # What the function raises is an outcome. This is the executor's own: a message
                # that cannot be pickled, a worker of a cluster that has died too often.
                raise WorkerLost(f"{type(error).__name__}: {error}", task) from error
            if outcome.kind != MISSING:
                return task, outcome
            self.submit(task, again=True)

    def dismiss(self) -> None:
        """Let workers go, there is nothing left to do: these have a life of their own."""

    def stop(self, *, kill: bool) -> None:
        """Take back what has not begun; in this process, wait for the rest.

        Parameters
        ----------
        kill
            Whether there may be tasks under way.
        """
        self.job.stopped = True
        running = [future for future in self._under_way.values() if not future.cancel()]
        if kill and self._waits:
            wait(running)
