"""`TensorDict`: a tree of tensors with a batch size, in memory, shared or in a directory."""

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data._utils.collate import default_collate_fn_map

from mmtensor import joining, modules, shaping
from mmtensor.errors import DeviceError
from mmtensor.geometry import as_shape
from mmtensor.jagged import JaggedTensor
from mmtensor.leaves import (
    DENSE_TYPES,
    accept,
    clone,
    mapping_under,
    name_path,
    standalone,
    to_plain,
)
from mmtensor.loading import load
from mmtensor.modes import ModeName
from mmtensor.rawfile import Path, absolute
from mmtensor.reference import for_checkpoint
from mmtensor.rendering import as_html, as_text
from mmtensor.saving import save, sync_directories
from mmtensor.shared import reduce_tree, register, share
from mmtensor.structure import register_node
from mmtensor.tree import MEMORY_MAPPED, SHARED, Leaves, Tree
from mmtensor.upward import Upward, collate

__all__ = ["TensorDict"]


class TensorDict(Upward):
    """Tensors under string keys, nested, that share leading batch dimensions.

    Leaves are tensors, `MemoryMappedTensor`, `JaggedTensor` (under a batch of one
    dimension), strings and lists of strings. `share_memory_` moves all of them into one block
    of shared memory, `memmap` writes them to a directory of raw files, and `load_memmap` opens
    such a directory. There it is locked: keys stay as they are, values can be written in place
    (`set_`, `update_`, ``td[index] = ...``), and every process sees them.

    An operation that only presents the same data otherwise (``td[3]``, ``td[2:5]``, `view`,
    `transpose`, `permute`, `squeeze`, `unsqueeze`, `unbind`, `split`, `chunk`, `expand`) gives
    one that is locked, shared or memory-mapped as before. `reshape` and the operations on keys
    (`clone` with ``recurse=False``, `select`, `exclude`, `flatten_keys`, `unflatten_keys`)
    give an unlocked one that holds the same data. ``td[ids]``, ``td[mask]``, `clone`, `apply`,
    `torch.stack` and `torch.cat` give regular memory.

    Parameters
    ----------
    source
        A mapping of keys to leaves, or a TensorDict. Nested mappings become TensorDicts.
    batch_size
        The leading dimensions that all leaves share.

    Raises
    ------
    RuntimeError
        If a leaf does not have the batch size; the message names it.
    TypeError
        If a value can be no leaf.

    Examples
    --------
    >>> td = mmtensor.TensorDict({"x": torch.zeros(3, 2), "n": {"y": torch.ones(3)}}, [3])
    >>> td["n", "y"]
    tensor([1., 1., 1.])
    >>> td[0]
    TensorDict(batch_size=[])
        x: [2] float32, memory
        n:
            y: [] float32, memory
    """

    __slots__ = ()

    # --- batch dimensions ----------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """The leading dimensions that all leaves share."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        self._check_unlocked("change the batch size")
        size = torch.Size(as_shape(value))
        leaves = {}
        for key, leaf in self._all().items():
            # It raises where a leaf does not have the size. Of nested ones that have a shorter
            # one it makes some with this; they keep longer ones.
            fitted = accept((key,), leaf, size, type(self))
            leaves[key] = fitted if isinstance(leaf, Tree) else leaf
        self._leaves, self._batch_size = leaves, size

    @property
    def shape(self) -> torch.Size:
        """The batch size."""
        return self._batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self._batch_size)

    def dim(self) -> int:
        """Return the number of batch dimensions."""
        return len(self._batch_size)

    def size(self, dim: int | None = None) -> Any:
        """Return the batch size, or one of its numbers."""
        return self._batch_size if dim is None else self._batch_size[dim]

    def numel(self) -> int:
        """Return the number of elements in the batch."""
        return self._batch_size.numel()

    def view(self, *shape: Any) -> Self:
        """Return the same data with the batch dimensions in another shape; one may be -1."""
        return shaping.view(self, shape)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any) -> Self:
        """Return an unlocked TensorDict of another batch size; leaves are copied if they must."""
        return shaping.reshape(self, shape)  # type: ignore[no-any-return]

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Return the same data with two batch dimensions swapped."""
        return shaping.transpose(self, dim0, dim1)  # type: ignore[no-any-return]

    def permute(self, *dims: Any) -> Self:
        """Return the same data with the batch dimensions in another order."""
        return shaping.permute(self, dims)  # type: ignore[no-any-return]

    def squeeze(self, dim: int | None = None) -> Self:
        """Return the same data without a batch dimension of size 1, or without all of them."""
        return shaping.squeeze(self, dim)  # type: ignore[no-any-return]

    def unsqueeze(self, dim: int) -> Self:
        """Return the same data with one more batch dimension, of size 1."""
        return shaping.unsqueeze(self, dim)  # type: ignore[no-any-return]

    def expand(self, *shape: Any) -> Self:
        """Return the same data with batch dimensions of size 1 repeated, without a copy."""
        return shaping.expand(self, shape)  # type: ignore[no-any-return]

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return the elements along a batch dimension, as views."""
        return shaping.unbind(self, dim)

    def split(self, split_size: int | list[int], dim: int = 0) -> tuple[Self, ...]:
        """Return consecutive parts along a batch dimension, as views; see `torch.split`."""
        return shaping.split(self, split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """Return a number of consecutive parts, as views; see `torch.chunk`."""
        return shaping.split(self, chunks, dim, chunks=True)

    # --- copies --------------------------------------------------------------------------

    def clone(self, recurse: bool = True) -> Self:
        """Return an unlocked copy.

        Parameters
        ----------
        recurse
            Whether the data is copied, to regular memory. Otherwise the copy has the same
            leaves, and nested TensorDicts of its own.

        Examples
        --------
        >>> td = TensorDict({"x": torch.zeros(2)})
        >>> td.clone(recurse=False)["x"] is td["x"]
        True
        """
        return self._map(clone) if recurse else self._shallow()

    def copy(self) -> Self:
        """Return ``clone(recurse=False)``."""
        return self._shallow()

    def apply(self, fn: Callable[..., Any], *others: "TensorDict", batch_size: Any = None) -> Self:
        """Return an unlocked TensorDict with what a function makes of each tensor.

        Parameters
        ----------
        fn
            Called with a tensor or JaggedTensor, and with those of `others` under the same
            key. Strings stay as they are. A leaf for which it returns None is left out.
        *others
            TensorDicts with the same keys.
        batch_size
            Of the result, where it is not the same.

        Examples
        --------
        >>> TensorDict({"x": torch.zeros(2)}, [2]).apply(lambda x: x + 1)["x"]
        tensor([1., 1.])
        """
        for other in others:
            if not isinstance(other, Tree):
                raise TypeError(f"others must be TensorDicts, got {type(other)!r}.")
        size = self._batch_size if batch_size is None else torch.Size(as_shape(batch_size))
        return _apply(self, fn, others, size, ())  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return an unlocked TensorDict with each tensor moved or converted.

        Parameters
        ----------
        *args, **kwargs
            As for `torch.Tensor.to`: a device, a dtype, ``non_blocking``.

        Raises
        ------
        DeviceError
            A `RuntimeError`: there is a JaggedTensor, and the device is not the CPU.
        """
        try:
            return self._map(
                lambda leaf: (
                    leaf.to(*args, **kwargs) if isinstance(leaf, Tensor | JaggedTensor) else leaf
                )
            )
        except DeviceError as error:
            path = next(path for path, leaf in self._flat() if isinstance(leaf, JaggedTensor))
            raise DeviceError(f"leaf {name_path(path)} cannot be moved: {error}") from None

    def as_tensor(self) -> Self:
        """Return an unlocked TensorDict with regular tensors on the same storages."""
        return self._map(to_plain)

    def to_dict(self) -> dict[str, Any]:
        """Return the leaves as nested dicts."""
        return {
            key: leaf.to_dict()
            if isinstance(leaf, TensorDict)
            else list(leaf)
            if isinstance(leaf, list)
            else leaf
            for key, leaf in self._all().items()
        }

    # --- the lock ------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether keys can be neither added nor removed nor replaced."""
        return bool(self._locks)

    def lock_(self) -> Self:
        """Lock the TensorDict and those in it; returns it."""
        return self if any(lock.owner() is self for lock in self._locks) else self._lock()

    def unlock_(self) -> Self:
        """Unlock the TensorDict and those in it; returns it.

        Those that were locked on their own stay so.

        It is neither shared nor memory-mapped from then on: its keys may come to hold regular
        tensors. The leaves stay where they are, and files as they were saved.

        Raises
        ------
        LockedError
            A `RuntimeError`: it is part of another locked TensorDict.
        """
        if self._locks:
            self._unlock()
        return self

    def is_memmap(self) -> bool:
        """Whether every leaf is on a file of a saved directory, and keys cannot change."""
        return self._kind() == MEMORY_MAPPED

    def is_shared(self) -> bool:
        """Whether every leaf is in shared memory, and keys cannot change."""
        return self._kind() == SHARED

    def share_memory_(self) -> Self:
        """Move all leaves into one block of shared memory and lock the TensorDict.

        To other processes it goes as one descriptor and one message, however many leaves
        there are. Tensors that were set before do not change: the leaves are new ones.

        Raises
        ------
        RuntimeError
            If it is memory-mapped, or a leaf is not on the CPU or is sparse.
        OSError
            ``ENOSPC`` without room; nothing has changed then.

        Examples
        --------
        >>> td = TensorDict({"x": torch.zeros(2)}).share_memory_()
        >>> td.is_shared(), td["x"].is_shared()
        (True, True)
        """
        if self.is_shared():
            return self
        if self.is_memmap():
            raise RuntimeError(
                "this TensorDict is memory-mapped, and other processes see it already. Share a "
                "copy in memory: td.clone().share_memory_()."
            )
        self._check_owner("share_memory_")
        share(self)
        return self

    def _check_owner(self, what: str) -> None:
        """Raise if the leaves belong to a locked TensorDict that this one is a part of."""
        trees = list(self._trees())
        for lock in (lock for tree in trees for lock in tree._locks):
            owner = lock.owner()
            if owner is not None and not any(tree is owner for tree in trees):
                raise RuntimeError(
                    f"{what} would change the leaves of another locked TensorDict, which this "
                    "one, or one in it, is part of. Call it on td.clone(recurse=False)."
                )

    # --- files ---------------------------------------------------------------------------

    def memmap(
        self,
        prefix: Path,
        num_threads: int = 0,
        return_early: bool = False,
        *,
        existsok: bool = True,
    ) -> Any:
        """Write all leaves to a directory of raw files, and return what is mapped there.

        The directory appears whole or not at all, and takes the place of what an earlier save
        left there; whoever has that open keeps it. A crash at any moment leaves the old one
        or the new one.

        Parameters
        ----------
        prefix
            The directory. One that holds anything that no save has written is not touched.
        num_threads
            How many threads write; 0: this one.
        return_early
            Whether to return a `concurrent.futures.Future` of the result at once.
        existsok
            Whether what an earlier save left there is replaced, as usual.

        Returns
        -------
        TensorDict
            Locked and memory-mapped, with mode ``"r+"``.

        Raises
        ------
        ExistingFileError
            A `FileExistsError`: the directory holds a file that no save has written, or without
            `existsok` anything.
        SymbolicLinkError
            A `RuntimeError`: the directory is a symbolic link.
        OSError
            ``EBUSY`` for a mount point and the current directory, ``ENOSPC`` on a full disk.
        TypeError
            If a leaf cannot be saved; the message names it.

        Examples
        --------
        >>> td = TensorDict({"x": torch.arange(3)}, [3]).memmap("saved")
        >>> td.is_memmap(), td["x"].mode
        (True, 'r+')
        >>> np.fromfile("saved/x.memmap", "int64")
        array([0, 1, 2])
        """
        path = absolute(prefix, directory=True)
        if not return_early:
            return save(self, path, num_threads=num_threads, existsok=existsok)
        return _later(save, self._shallow(), path, num_threads=num_threads, existsok=existsok)

    def memmap_(
        self,
        prefix: Path,
        num_threads: int = 0,
        return_early: bool = False,
        *,
        existsok: bool = True,
    ) -> Any:
        """Write all leaves to a directory of raw files, and hold them from then on.

        Parameters
        ----------
        prefix, num_threads, return_early, existsok
            As for `memmap`. With `return_early` it is locked at once.

        Returns
        -------
        TensorDict
            This one, locked and memory-mapped.

        Raises
        ------
        RuntimeError
            If it is shared, or part of a locked TensorDict.
        ExistingFileError, SymbolicLinkError, OSError, TypeError
            As for `memmap`.

        Examples
        --------
        >>> td = TensorDict({"x": torch.arange(3)}, [3])
        >>> td.memmap_("held").is_memmap()
        True
        """
        if self.is_shared():
            raise RuntimeError(
                "this TensorDict is in shared memory, where other processes would not see it "
                "move. Use td.memmap(prefix), which returns another one."
            )
        self._check_owner("memmap_")
        path = absolute(prefix, directory=True)
        if not return_early:
            self._take(save(self, path, num_threads=num_threads, existsok=existsok), path)
            return self
        locked = self.is_locked
        self.lock_()

        def write() -> TensorDict:
            try:
                self._take(save(self, path, num_threads=num_threads, existsok=existsok), path)
            except BaseException:
                if not locked:
                    self._unlock()
                raise
            return self

        return _later(write)

    def _take(self, other: Tree, path: str) -> None:
        """Hold the leaves of another tree with the same keys."""
        _take(self, other)
        self._lock(MEMORY_MAPPED, path)

    def memmap_like(self, prefix: Path, *, existsok: bool = True) -> Self:
        """Make a directory of zeros with the same keys, shapes and dtypes.

        Parameters
        ----------
        prefix, existsok
            As for `memmap`. Disk space is reserved.

        Returns
        -------
        TensorDict
            Locked and memory-mapped, with mode ``"r+"``. Strings are as here.

        Examples
        --------
        >>> td = TensorDict({"x": torch.ones(3)}, [3]).memmap_like("zeros")
        >>> td["x"]
        MemoryMappedTensor([0., 0., 0.])
        """
        path = absolute(prefix, directory=True)
        return save(self, path, like=True, existsok=existsok)  # type: ignore[no-any-return]

    save = memmap

    @classmethod
    def load_memmap(cls, prefix: Path, mode: ModeName | None = None) -> Self:
        """Open a directory that `memmap` or tensordict has written.

        All of it is of one version, also while it is being replaced.

        Parameters
        ----------
        prefix
            The directory.
        mode
            ``"r"``, ``"r+"`` or ``"c"``; None: ``"r+"`` if all files may be written, else
            ``"c"``.

        Returns
        -------
        TensorDict
            Locked and memory-mapped.

        Raises
        ------
        FileNotFoundError
            If nothing was saved there.
        ManifestError
            A `ValueError` that names the leaf: its file is missing or of another size, or
            what ``meta.json`` says of it cannot be.

        Examples
        --------
        >>> _ = TensorDict({"x": torch.arange(3)}, [3]).memmap("again")
        >>> TensorDict.load_memmap("again", mode="r")["x"].sum()
        tensor(3)
        """
        return load(cls, absolute(prefix, directory=True), mode)  # type: ignore[no-any-return]

    load = load_memmap

    def flush(self) -> None:
        """Write the changes in all leaves to stable storage, and wait.

        For a TensorDict that was saved or loaded, names and ``meta.json`` are written too.

        Examples
        --------
        >>> TensorDict({"x": torch.ones(3)}, [3]).memmap("flushed").flush()
        """
        done = set()
        for _, leaf in self._flat():
            if isinstance(leaf, JaggedTensor):
                leaf.flush()
                continue
            mapping = mapping_under(leaf)
            if mapping is not None and id(mapping) not in done:
                done.add(id(mapping))
                mapping.flush()
        for lock in self._locks:
            if lock.directory and lock.owner() is self:
                sync_directories(self, lock.directory)

    # --- modules -------------------------------------------------------------------------

    @classmethod
    def from_module(cls, module: nn.Module) -> Self:
        """Return the parameters and buffers of a module, nested as its submodules are.

        Parameters
        ----------
        module
            The leaves are its very parameters, not copies.

        Examples
        --------
        >>> list(TensorDict.from_module(torch.nn.Sequential(torch.nn.Linear(2, 1)))["0"].keys())
        ['weight', 'bias']
        """
        return modules.from_module(cls, module)  # type: ignore[no-any-return]

    def to_module(self, module: nn.Module) -> nn.Module:
        """Put the leaves into a module as its parameters and buffers; returns the module.

        They are plain parameters on the same storages, and require gradients as those did
        that they replace. Make an optimizer afterwards.

        Parameters
        ----------
        module
            With the same names and shapes.

        Raises
        ------
        KeyError
            If a name is missing on one side.
        RuntimeError
            If a shape is another one. The module is as it was.

        Examples
        --------
        >>> layer = torch.nn.Linear(2, 1)
        >>> td = TensorDict.from_module(layer).memmap("weights")
        >>> layer = TensorDict.load_memmap("weights", mode="c").to_module(layer)
        >>> layer.weight.requires_grad
        True
        """
        modules.to_module(self, module)
        return module

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> Self:
        """Return a state dict as a TensorDict: names are nested at their dots.

        Parameters
        ----------
        state_dict
            Tensors by name, as from `torch.nn.Module.state_dict`.
        """
        return modules.from_state_dict(cls, state_dict)  # type: ignore[no-any-return]

    def to_state_dict(self) -> dict[str, Tensor]:
        """Return the leaves as a state dict of regular tensors on the same storages."""
        return modules.to_state_dict(self)

    # --- torch, pickle, print ------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is None:
            return NotImplemented
        return handler(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not for_checkpoint(protocol):
            return reduce_tree(self)
        return reduce_tree(self._map(standalone))

    def __copy__(self) -> Self:
        return self._shallow()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = memo[id(self)] = self._map(clone)
        return copy

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def _apply(
    tree: Tree, fn: Callable[..., Any], others: Any, size: torch.Size, prefix: tuple[str, ...]
) -> Any:
    """Do what `TensorDict.apply` does; `size` is the batch size of the result."""
    dims, count = len(tree._batch_size), len(size)
    leaves: Leaves = {}
    for key, leaf in tree._all().items():
        theirs = [other._find((key,)) for other in others]
        if isinstance(leaf, Tree):
            nested = torch.Size((*size, *leaf._batch_size[dims:]))
            leaves[key] = _apply(leaf, fn, theirs, nested, (*prefix, key))
        elif isinstance(leaf, str | list):
            leaves[key] = leaf
        else:
            value = fn(leaf, *theirs)
            if type(value) in DENSE_TYPES and value.shape[:count] == size:
                leaves[key] = value
            elif value is not None:
                leaves[key] = accept((*prefix, key), value, size, type(tree))
    return tree._make(leaves, size)


def _take(mine: Tree, theirs: Tree) -> None:
    """Let containers hold the leaves of others with the same keys."""
    leaves = dict(theirs._all())
    for key, leaf in mine._all().items():
        if isinstance(leaf, Tree):
            _take(leaf, leaves[key])
            leaves[key] = leaf
    mine._leaves = leaves


def _later(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    pool = ThreadPoolExecutor(1, thread_name_prefix="mmtensor-save")
    future = pool.submit(function, *args, **kwargs)
    pool.shutdown(wait=False)
    return future


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: joining.stack,
    torch.cat: joining.cat,
    torch.unbind: TensorDict.unbind,
    torch.split: TensorDict.split,
    torch.chunk: TensorDict.chunk,
    torch.squeeze: TensorDict.squeeze,
    torch.unsqueeze: TensorDict.unsqueeze,
    torch.permute: TensorDict.permute,
    torch.transpose: TensorDict.transpose,
    torch.reshape: TensorDict.reshape,
    torch.clone: TensorDict.clone,
}

# Errors about arguments name the function as people know it: TensorDict.map, not Upward.map.
for _base in TensorDict.__mro__[1:-1]:
    for _name, _function in vars(_base).items():
        if not _name.startswith("_") and inspect.isfunction(_function):
            _function.__qualname__ = f"TensorDict.{_name}"

register(TensorDict)
default_collate_fn_map[TensorDict] = collate
register_node(TensorDict, "mmtensor.TensorDict")
