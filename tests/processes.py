"""Child processes for the tests: spawn and forkserver import this module by its name."""

import multiprocessing
import os
import pickle
import queue

import torch
import torch.multiprocessing

import mmtensor
from mmtensor import MemoryMappedTensor

METHODS = ("fork", "spawn", "forkserver")
LIBRARIES = {"multiprocessing": multiprocessing, "torch.multiprocessing": torch.multiprocessing}
CHANNELS = ("queue", "simple", "pipe")
# Seconds after which a message that has not come never will.
PATIENCE = 60


class Tagged(MemoryMappedTensor):
    """A subclass, as users make them."""


class Holder:
    """An object that keeps a tensor from the kernel's point of view alive: a data set."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


# Views of a real (6, 4) tensor. Those under "torch." are plain tensors on the same storage.
REAL_VIEWS = {
    "whole": lambda x: x,
    "row": lambda x: x[3],
    "element": lambda x: x[1, 2],
    "rows": lambda x: x[2:5],
    "steps": lambda x: x[1::2],
    "column": lambda x: x[:, 1],
    "columns": lambda x: x[..., 1:3],
    "nothing": lambda x: x[:0],
    "new axis": lambda x: x[None],
    "view": lambda x: x[:2].view(4, 2),
    "view of another dtype": lambda x: x.view(torch.int16),
    "t": lambda x: x.t(),
    "T of rows": lambda x: x[1:4].T,
    "permute": lambda x: x.view(2, 3, 4).permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x[2:3].squeeze(),
    "narrow": lambda x: x.narrow(0, 2, 3),
    "select": lambda x: x.select(1, 3),
    "detach": lambda x: x.detach(),
    "expand": lambda x: x[2].expand(5, 4),
    "unfold": lambda x: x.unfold(0, 3, 2),
    "unflatten": lambda x: x.unflatten(0, (2, 3)),
    "diagonal": lambda x: x.diagonal(1),
    "as_strided": lambda x: x.as_strided((3, 2), (5, 2), 4),
    "unbind": lambda x: x.unbind(1)[2],
    "split": lambda x: x.split(4)[1],
    "view of a view of a view": lambda x: x[1:].t()[1:, ::2][1],
    "data": lambda x: x[1:].data,
    "torch.t": torch.t,
    "torch.narrow": lambda x: torch.narrow(x, 1, 1, 2),
    "torch.flatten": torch.flatten,
    "torch.diagonal": torch.diagonal,
}
# Views of a complex (6, 4) tensor; most have the conjugate or the negative bit.
COMPLEX_VIEWS = {
    "conj": lambda x: x.conj(),
    "conj of rows": lambda x: x[1:3].conj(),
    "rows of conj": lambda x: x.conj()[1:3].t(),
    "imag of conj": lambda x: x.conj().imag,
    "part of imag of conj": lambda x: x.conj().imag[1:, 2],
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "H": lambda x: x.H,
    "mH": lambda x: x[2:4].mH,
    "adjoint": lambda x: x.adjoint(),
    "twice conj": lambda x: x.conj().conj(),
    "torch.conj": torch.conj,
    "torch.view_as_real": torch.view_as_real,
    "torch.imag of torch.conj": lambda x: torch.imag(torch.conj(x)),
    "torch.t of conj": lambda x: torch.t(x.conj()),
}


def real_values():
    """Return what the files of real test tensors hold."""
    return torch.arange(1.0, 25.0).view(6, 4)


def complex_values():
    """Return what the files of complex test tensors hold."""
    return torch.complex(real_values(), -real_values() - 0.5)


def facts(x):
    """Return everything that a view is: class, file, mode, geometry, bits, values."""
    where = mmtensor.locate(x)
    return (
        type(x).__name__,
        None if where is None else where,
        x.dtype,
        tuple(x.shape),
        x.stride(),
        x.storage_offset() if where is not None else 0,
        x.is_conj(),
        x.is_neg(),
        values(x),
    )


def values(x):
    """Return the elements as nested lists."""
    return x.detach().clone().resolve_conj().resolve_neg().tolist()


def storages(xs):
    """Return how many different storages some tensors stand on."""
    return len({id(x.untyped_storage()) for x in xs})


# --- what children do ------------------------------------------------------------------


def all_facts(xs):
    """Return the facts of each tensor, and the number of storages under them."""
    return [facts(x) for x in xs], storages(xs)


def write(x, value):
    """Fill a tensor."""
    x.fill_(value)
    return values(x)


def echo(x):
    """Send back what came."""
    return x


def send_facts(connection, x):
    """Send the facts of a tensor that came as an argument of the process."""
    connection.send(facts(x))
    connection.close()


def open_descriptors():
    """Return how many descriptors the process holds."""
    return len(os.listdir("/proc/self/fd"))


def receive_and_forget(x):
    """Look at a tensor, let it go, and count the descriptors."""
    total = float(x.sum())
    del x
    return total


def load(data):
    """Unpickle in the child."""
    return facts(pickle.loads(data))


def keep(x, kept=[]):  # noqa: B006  # it is to outlive the call
    """Hold on to a tensor for as long as the process lives, and count those held."""
    kept.append(x)
    return storages(kept), [values(x) for x in kept]


def forget(kept=keep.__defaults__[0]):
    """Let go of what `keep` holds."""
    kept.clear()


def serve(inward, outward):
    """Do what messages ask for until one asks for nothing."""
    while True:
        try:
            message = inward.get()
            if message is None:
                return
            function, *arguments = message
            answer = function(*arguments)
            del message, arguments
        except Exception as error:  # noqa: BLE001  # it is what the other side wants to see
            answer = error
        outward.put(answer)
        del answer


class Connection:
    """A pipe with the methods of a queue."""

    def __init__(self, connection):
        self.connection = connection

    def put(self, x):
        self.connection.send(x)

    def get(self, timeout=None):
        if timeout is not None and not self.connection.poll(timeout):
            raise TimeoutError(f"no message within {timeout} s")
        return self.connection.recv()


class Simple(Connection):
    """A `SimpleQueue` whose reader does not wait for ever."""

    def __init__(self, simple):
        self.simple = simple

    def put(self, x):
        self.simple.put(x)

    def get(self, timeout=None):
        if timeout is not None and not self.simple._reader.poll(timeout):
            raise TimeoutError(f"no message within {timeout} s")
        return self.simple.get()


class Child:
    """A process that runs functions of this module on what it is sent.

    Parameters
    ----------
    method
        How it is started.
    library
        A name in `LIBRARIES`.
    channel
        A name in `CHANNELS`: how messages go both ways.
    """

    def __init__(self, method, library="multiprocessing", channel="queue"):
        context = LIBRARIES[library].get_context(method)
        if channel == "pipe":
            (near, far), (far_out, near_out) = context.Pipe(), context.Pipe()
            self.inward, inward = Connection(near), Connection(far)
            outward, self.outward = Connection(far_out), Connection(near_out)
        elif channel == "simple":
            self.inward = inward = Simple(context.SimpleQueue())
            self.outward = outward = Simple(context.SimpleQueue())
        else:
            self.inward = inward = context.Queue()
            self.outward = outward = context.Queue()
        self.process = context.Process(target=serve, args=(inward, outward), daemon=True)
        self.process.start()

    def put(self, function, *arguments):
        """Ask for something, and do not wait."""
        self.inward.put((function, *arguments))

    def get(self):
        """Wait for an answer; an exception of the child is raised here."""
        for _ in range(PATIENCE):
            try:
                answer = self.outward.get(timeout=1)
            except (TimeoutError, queue.Empty):
                # A child that failed to start, or was ended, will never answer.
                assert self.process.is_alive(), f"ended with {self.process.exitcode}"
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer
        raise TimeoutError(f"no answer within {PATIENCE} s")

    def ask(self, function, *arguments):
        """Ask for something and wait for the answer."""
        self.put(function, *arguments)
        return self.get()

    def close(self):
        """End the process; return its exit code."""
        if self.process.is_alive():
            self.inward.put(None)
        return join(self.process)


def join(process):
    """Wait for a process; one that does not end is killed, and that is an error."""
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{process.name} did not end within {PATIENCE} s")
    return process.exitcode


def numbers_of(value):
    """Return all numbers in a tensor, storage, jagged tensor or container."""
    if isinstance(value, mmtensor.TensorDict):
        return {key: numbers_of(leaf) for key, leaf in value.items()}
    if isinstance(value, torch.UntypedStorage):
        return list(value)
    return value.tolist()


def send_numbers(items, pipe):
    """Send what came as an argument of a process."""
    pipe.send({name: numbers_of(value) for name, value in items.items()})
    pipe.close()
