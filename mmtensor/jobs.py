"""What workers of a parallel map do: run a function over a range of chunks.

A worker has the container, once, and is told numbers of chunks. What it makes of a range
goes back as one message.
"""

import os
import pickle
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmtensor.chunks import Cut, Misfit, are_alike

__all__ = [
    "FAILED",
    "JOINED",
    "MISFIT",
    "MISSING",
    "NOTHING",
    "RESULTS",
    "Job",
    "Outcome",
    "Task",
    "WorkerLost",
    "in_words",
    "portable",
    "run_cached",
    "unpacked",
]

# What a task comes to: every result was None or is written; the results joined, or in a list;
# an exception of the function; the worker does not have the job.
# Or a result that does not fit into `out`.
NOTHING, JOINED, RESULTS, FAILED, MISSING, MISFIT = range(6)

# Jobs that a worker of somebody else's executor holds: as many as may run side by side in it.
# What is in them stays in memory until others come.
_HELD = 2
_held: OrderedDict[bytes, "Job"] = OrderedDict()
_SEEDS = 1 << 63
# Results that are written to `out` together: a call for each takes longer than its copy, and
# more of them take memory that is not in the cache, nor in a forked process yet.
_WRITTEN = 32


class Task:
    """A range of chunks on its way.

    Parameters
    ----------
    first, last
        The chunks from `first` to before `last`.
    seconds
        After how long no further chunk is begun.

    Attributes
    ----------
    outcome : Outcome or None
        What it came to, once it is done.
    """

    __slots__ = ("first", "last", "outcome", "seconds")

    def __init__(self, first: int, last: int, seconds: float) -> None:
        self.first = first
        self.last = last
        self.seconds = seconds
        self.outcome: Outcome | None = None


class WorkerLost(Exception):  # noqa: N818  # it is never seen outside
    """A worker has died, or cannot be reached.

    Parameters
    ----------
    message
        What is known.
    task
        What it was about; None: nobody knows.
    chunk
        Which chunk of it; None: nobody knows.
    """

    def __init__(self, message: str, task: Task | None, chunk: int | None = None) -> None:
        super().__init__(message)
        self.task = task
        self.chunk = chunk


class Outcome(NamedTuple):
    """What a task comes to.

    Parameters
    ----------
    kind
        `NOTHING`, `JOINED`, `RESULTS`, `FAILED`, `MISSING` or `MISFIT`.
    seconds
        How long all chunks together took.
    value
        The results, or the exception.
    chunk
        Which chunk has failed.
    last
        Before which chunk it ended.
    """

    kind: int
    seconds: float = 0.0
    value: Any = None
    chunk: int = 0
    last: int = 0


class Job:
    """A function, what it is mapped over, and where results go.

    Parameters
    ----------
    fn
        Called with each chunk.
    source
        The container that is cut.
    cut
        How.
    out
        Where results are written; None: they are returned.
    joins
        Whether results are stacked or concatenated in the worker, as far as they can be.
    seed
        Where the seeds of torch's generator start, one for each chunk; None in threads,
        which share it.
    """

    __slots__ = ("cut", "fn", "home", "joins", "out", "seed", "source", "stopped", "token")

    def __init__(
        self,
        fn: Callable[[Any], Any],
        source: Any,
        cut: Cut,
        *,
        out: Any = None,
        joins: bool = True,
        seed: int | None = None,
    ) -> None:
        self.fn = fn
        self.source = source
        self.cut = cut
        self.out = out
        self.joins = joins
        self.seed = seed
        self.home = os.getpid()
        self.token = os.urandom(16)
        # Seen by threads only.
        self.stopped = False

    def run(self, first: int, last: int, seconds: float, at: Any = None) -> Outcome:
        """Call the function for the chunks from `first` to before `last`.

        Parameters
        ----------
        first, last
            Which chunks.
        seconds
            After how long no further one is begun.
        at
            Memory that is told which chunk is at work: a sequence with one number.
        """
        away = os.getpid() != self.home
        seed = self.seed if away else None
        generator = torch.default_generator
        cut, fn, source, out = self.cut, self.fn, self.source, self.out
        clock = time.perf_counter
        results: list[Any] = []
        number = first
        now = began = clock()
        end = began + seconds
        try:
            for number in range(first, last):
                if self.stopped or (now > end and number > first):
                    last = number
                    break
                if at is not None:
                    at[0] = number
                if seed is not None:
                    # Workers that were forked have all the same generator.
                    generator.manual_seed((seed + number) % _SEEDS)
                results.append(fn(source[cut.index(number)]))
                if out is not None and len(results) == _WRITTEN:
                    cut.store(out, number + 1 - _WRITTEN, results)
                    results.clear()
                now = clock()
            outcome = self._outcome(last, results, now - began)
            value = self._pack(outcome.value) if away else outcome.value
            return outcome._replace(value=value, last=last)
        except Misfit as error:
            cause = error.__cause__ or error
            return Outcome(MISFIT, 0.0, portable(cause) if away else cause, error.chunk)
        except Exception as error:  # noqa: BLE001  # it is raised where the map was called
            return Outcome(FAILED, 0.0, portable(error) if away else error, number)
        except BaseException as error:
            # A worker lives on after sys.exit() in the function; a thread of the caller's own
            # process may be the one that Ctrl-C is for.
            if not away:
                raise
            return Outcome(FAILED, 0.0, portable(error), number)

    def _pack(self, value: Any) -> Any:
        """Put tensors into containers, which travel as what they show, in one piece.

        A tensor on its own would be sent by torch, which moves all of the memory that it is a
        view of to shared memory.
        """
        if isinstance(value, list):
            return [self._pack(one) for one in value]
        if isinstance(value, Tensor):
            return _Packed(self.source._make({"": value}, torch.Size()))
        return value

    def _outcome(self, last: int, results: list[Any], seconds: float) -> Outcome:
        """Write or join the results of the chunks before `last`."""
        if self.out is not None:
            self.cut.store(self.out, last - len(results), results)
            return Outcome(NOTHING, seconds)
        nones = sum(result is None for result in results)
        if nones == len(results):
            return Outcome(NOTHING, seconds)
        if self.joins and not nones and are_alike(results):
            try:
                return Outcome(JOINED, seconds, self.cut.join(results))
            except (RuntimeError, TypeError, KeyError, IndexError):
                pass  # whoever wants them joined says what is wrong
        return Outcome(RESULTS, seconds, results)


class _Packed(NamedTuple):
    """A tensor on its way, as the only leaf of a container."""

    tree: Any


def unpacked(value: Any) -> Any:
    """Return results as the function returned them."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    return value.tree._leaves[""] if isinstance(value, _Packed) else value


def portable(error: BaseException) -> BaseException:
    """Return what arrives in another process as an exception, with its traceback as a note."""
    text = "".join(traceback.format_exception(error)).rstrip()
    note = f"In the worker process:\n{text}"
    error.__cause__ = error.__context__ = None
    error.__traceback__ = None
    error.add_note(note)
    # Those with a constructor of their own may pickle, and yet not come back: pickle calls it
    # with the arguments of Exception's.
    for sent in (error, _Parts(error)):
        if _arrives(sent):
            return sent
    error = RuntimeError(in_words(error))
    error.add_note(note)
    return error


def in_words(error: BaseException) -> str:
    """Return class and text of an exception, also where its own text is an error."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # a method of the user's
        return type(error).__name__


def _arrives(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # made a moment ago
    except Exception:  # noqa: BLE001  # whatever is wrong with it
        return False
    return True


class _Parts(Exception):  # noqa: N818  # it is never seen outside
    """An exception on its way, which arrives as itself without a call of its constructor."""

    def __reduce__(self) -> tuple[Any, ...]:
        error: BaseException = self.args[0]
        return _put_together, (type(error), error.args, error.__dict__)


def _put_together(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


# Not empty in a process that was forked, until its first task.
_forked: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


def run_cached(token: bytes, job: Job | None, first: int, last: int, seconds: float) -> Outcome:
    """Run a range of chunks in a worker that may have the job from an earlier task.

    Parameters
    ----------
    token
        Which job.
    job
        None: the worker is taken to have it. Otherwise it has it from now on.
    first, last, seconds
        As for `Job.run`.
    """
    if _forked:
        # The threads of OpenMP do not survive a fork; torch would wait for them for ever.
        torch.set_num_threads(1)
        _forked.clear()
    if job is not None and token not in _held:
        _held[token] = job
        while len(_held) > _HELD:
            _held.popitem(last=False)
    found = _held.get(token)
    return Outcome(MISSING) if found is None else found.run(first, last, seconds)
