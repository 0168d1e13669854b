"""A container to a directory and back, many small leaves and few large ones."""

import os
from collections.abc import Callable
from typing import Any

import safetensors.torch
import tensordict
import torch
from torch import nn

import mmtensor

from .common import Comparison, FreshFile, values
from .system import CREATE, map_and_unmap

_KINDS: dict[str, Any] = {
    "mmtensor": mmtensor.TensorDict,
    "tensordict": tensordict.TensorDict,
}
_COUNT, _NBYTES = 100, 4096


def _many() -> dict[str, torch.Tensor]:
    source = values(_NBYTES // 4)
    return {f"leaf{number}": source + number for number in range(_COUNT)}


class SaveMany(FreshFile):
    """Where the number of files decides."""

    title = "`memmap` of 100 leaves of 4 KB"
    limit_is = "100 × (open, pwrite, mmap, close, munmap)"

    def use(self, kind: Any) -> Callable[[str], Any]:
        """Return what is timed, for one library."""
        memmap: Callable[[str], Any] = kind(_many(), [_NBYTES // 4]).memmap
        return memmap

    def mmtensor(self) -> Callable[[str], Any]:
        """All or nothing."""
        return self.use(mmtensor.TensorDict)

    def tensordict(self) -> Callable[[str], Any]:
        """File by file."""
        return self.use(tensordict.TensorDict)

    def limit(self) -> Callable[[str], Any]:
        """The system calls."""
        data = [memoryview(leaf.numpy()).cast("B") for leaf in _many().values()]

        def calls(path: str) -> None:
            os.mkdir(path)
            for number, leaf in enumerate(data):
                fd = os.open(f"{path}/leaf{number}.memmap", CREATE, 0o666)
                os.pwrite(fd, leaf, 0)
                map_and_unmap(fd, _NBYTES)

        return calls


class SaveOver(FreshFile):
    """The same in the place of an earlier save.

    Each time a directory of its own: the files that a save replaces are deleted, and ext4
    would look past them for a minute, see `common.root`.
    """

    title = "`memmap` of 100 leaves of 4 KB over an existing directory"

    def before(self, library: str) -> str:
        """Save for the first time."""
        path = self.new_path()
        os.mkdir(path)  # its place on the disk is its own
        target = os.path.join(path, "saved")
        _KINDS[library](_many(), [_NBYTES // 4]).memmap(target)
        return target

    def use(self, kind: Any) -> Callable[[str], Any]:
        """Return what is timed, for one library."""
        memmap: Callable[[str], Any] = kind(_many(), [_NBYTES // 4]).memmap
        return memmap

    def mmtensor(self) -> Callable[[str], Any]:
        """Old or new, whenever it is interrupted; whoever has the old one open keeps it."""
        return self.use(mmtensor.TensorDict)

    def tensordict(self) -> Callable[[str], Any]:
        """Into the old files, which are mapped elsewhere perhaps."""
        return self.use(tensordict.TensorDict)


class LoadMany(Comparison):
    """Where the number of files decides."""

    title = "`load_memmap` of 100 leaves of 4 KB"
    limit_is = "100 × (open, fstat, mmap, close, munmap)"

    def use(self, kind: Any) -> Callable[[], Any]:
        """Return what is timed, for one library."""
        path = self.new_path()
        kind(_many(), [_NBYTES // 4]).memmap(path)
        return lambda: kind.load_memmap(path)

    def mmtensor(self) -> Callable[[], Any]:
        """What is in the directory is checked."""
        return self.use(mmtensor.TensorDict)

    def tensordict(self) -> Callable[[], Any]:
        """What is in the directory is believed."""
        return self.use(tensordict.TensorDict)

    def limit(self) -> Callable[[], Any]:
        """The system calls."""
        path = self.new_path()
        mmtensor.TensorDict(_many(), [_NBYTES // 4]).memmap(path)
        paths = [f"{path}/leaf{number}.memmap" for number in range(_COUNT)]

        def calls() -> None:
            for name in paths:
                fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                os.fstat(fd)
                map_and_unmap(fd, _NBYTES)

        return calls


class _Encoder(nn.Module):
    """As large as BERT's base model, one layer less: 406 MB in 133 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30522, 768)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(768, 12, 3072) for _ in range(11))


_made: dict[type[nn.Module], nn.Module] = {}


def _module(kind: type[nn.Module]) -> nn.Module:
    """Return a module that benchmarks only read; made once in a process."""
    if kind not in _made:
        _made[kind] = kind()
    return _made[kind]


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in module.named_parameters()}


class _Large(FreshFile):
    """Much to write, after everything that was written before has settled.

    There is memory for it as well.

    The journal frees the blocks of emptied files when it comes to it, and a new file that
    needs blocks waits for it then: up to 0.9 s (measured), whoever makes it.
    """

    memory = 1 << 29

    def before(self, library: str) -> Any:
        """Wait, and name the file or directory."""
        os.sync()
        return super().before(library)


class SerializeLarge(_Large):
    """Where the bytes decide."""

    title = "`from_module(m).memmap`, 406 MB in 133 leaves"
    limit_is = "mkdir, 133 × (open, fallocate, pwrite, close)"

    def use(self, kind: Any) -> Callable[[str], Any]:
        """Return what is timed, for one library."""
        module = _module(_Encoder)
        return lambda path: kind.from_module(module).memmap(path)

    def mmtensor(self) -> Callable[[str], Any]:
        """All or nothing."""
        return self.use(mmtensor.TensorDict)

    def tensordict(self) -> Callable[[str], Any]:
        """File by file."""
        return self.use(tensordict.TensorDict)

    def torch(self) -> Callable[[str], Any]:
        """`torch.save`."""
        module = _module(_Encoder)
        return lambda path: torch.save(module.state_dict(), path)

    def safetensors(self) -> Callable[[str], Any]:
        """`save_file`."""
        module = _module(_Encoder)
        return lambda path: safetensors.torch.save_file(_weights(module), path)

    def limit(self) -> Callable[[str], Any]:
        """The system calls."""
        weights = _weights(_module(_Encoder)).values()
        data = [memoryview(weight.numpy()).cast("B") for weight in weights]

        def calls(path: str) -> None:
            os.mkdir(path)
            for number, leaf in enumerate(data):
                fd = os.open(f"{path}/{number}", CREATE, 0o666)
                os.posix_fallocate(fd, 0, len(leaf))
                os.pwrite(fd, leaf, 0)
                os.close(fd)

        return calls


class LoadLarge(Comparison):
    """Weights that are all read once, from files as each library writes them."""

    title = "load 406 MB in 133 leaves and sum each"
    limit_is = "sums in memory"

    def use(self, kind: Any) -> Callable[[], Any]:
        """Return what is timed, for one library."""
        path = self.new_path()
        kind.from_module(_module(_Encoder)).memmap(path)
        return lambda: [leaf.sum() for leaf in kind.load_memmap(path).values(True, True)]

    def mmtensor(self) -> Callable[[], Any]:
        """With mmtensor."""
        return self.use(mmtensor.TensorDict)

    def tensordict(self) -> Callable[[], Any]:
        """With tensordict."""
        return self.use(tensordict.TensorDict)

    def torch(self) -> Callable[[], Any]:
        """`torch.load` with a map."""
        path = self.new_path()
        torch.save(_module(_Encoder).state_dict(), path)
        return lambda: [leaf.sum() for leaf in torch.load(path, mmap=True).values()]

    def safetensors(self) -> Callable[[], Any]:
        """`load_file`."""
        path = self.new_path()
        safetensors.torch.save_file(_weights(_module(_Encoder)), path)
        return lambda: [leaf.sum() for leaf in safetensors.torch.load_file(path).values()]

    def limit(self) -> Callable[[], Any]:
        """What is in memory already."""
        weights = list(_weights(_module(_Encoder)).values())
        return lambda: [weight.sum() for weight in weights]


class _Threads(_Large):
    """`nn.Transformer()`, 176 MB in 184 leaves, with 32 threads, as tensordict's suite does."""

    def use(self, kind: Any) -> Callable[[Any], Any]:
        """Return what is timed, for one library."""
        raise NotImplementedError

    def mmtensor(self) -> Callable[[Any], Any]:
        """With mmtensor."""
        return self.use(mmtensor.TensorDict)

    def tensordict(self) -> Callable[[Any], Any]:
        """With tensordict."""
        return self.use(tensordict.TensorDict)


class SerializeModel(_Threads):
    """A module to a directory."""

    title = "`from_module(nn.Transformer()).memmap`, 32 threads"

    def use(self, kind: Any) -> Callable[[Any], Any]:
        """Return what is timed, for one library."""
        module = _module(nn.Transformer)
        return lambda path: kind.from_module(module).memmap(path, num_threads=32)

    def torch(self) -> Callable[[Any], Any]:
        """`torch.save` of the state dict."""
        module = _module(nn.Transformer)
        return lambda path: torch.save(module.state_dict(), path)


class SerializeModelPickle(_Threads):
    """A module to a checkpoint of torch."""

    title = "`torch.save(from_module(nn.Transformer()))`"

    def use(self, kind: Any) -> Callable[[Any], Any]:
        """Return what is timed, for one library."""
        module = _module(nn.Transformer)
        return lambda path: torch.save(kind.from_module(module), path)

    torch = SerializeModel.torch


class SerializeWeights(_Threads):
    """Weights that are in a container already."""

    title = "`weights.memmap`, 32 threads"

    def use(self, kind: Any) -> Callable[[Any], Any]:
        """Return what is timed, for one library."""
        weights = kind.from_module(_module(nn.Transformer))
        return lambda path: weights.memmap(path, num_threads=32)

    def torch(self) -> Callable[[Any], Any]:
        """`torch.save` of the state dict."""
        weights = _module(nn.Transformer).state_dict()
        return lambda path: torch.save(weights, path)


class SerializeWeightsPickle(_Threads):
    """Weights that are in a container already, to a checkpoint of torch."""

    title = "`torch.save(weights)`"

    def use(self, kind: Any) -> Callable[[Any], Any]:
        """Return what is timed, for one library."""
        weights = kind.from_module(_module(nn.Transformer))
        return lambda path: torch.save(weights, path)

    torch = SerializeWeights.torch


class SerializeWeightsReturnEarly(_Threads):
    """How long the caller waits."""

    title = "`weights.memmap(return_early=True)`, 32 threads"

    def before(self, library: str) -> Any:
        """Name the directory."""
        return [super().before(library)]

    def after(self, argument: Any) -> None:
        """Wait until it is written, and free it."""
        if len(argument) > 1:
            argument.pop().result()
        super().after(argument[0])

    def use(self, kind: Any) -> Callable[[Any], Any]:
        """Return what is timed, for one library."""
        weights = kind.from_module(_module(nn.Transformer))

        def save(argument: Any) -> None:
            future = weights.memmap(argument[0], num_threads=32, return_early=True)
            argument.append(future)

        return save
