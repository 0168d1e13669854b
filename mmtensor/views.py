"""The table of view methods, and the guards of the methods that write."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mmtensor.errors import GradientError
from mmtensor.storage import refuse_write

__all__ = ["install", "keeping_bounds", "refuse_gradients"]

# Methods whose result always is a view of the tensor.
_VIEWS = (
    "adjoint",
    "as_strided",
    "broadcast_to",
    "detach",
    "diagonal",
    "expand",
    "expand_as",
    "movedim",
    "moveaxis",
    "narrow",
    "permute",
    "select",
    "squeeze",
    "swapaxes",
    "swapdims",
    "t",
    "transpose",
    "unflatten",
    "unfold",
    "unsqueeze",
    "view",
    "view_as",
)
# Methods whose result is a tuple of views.
_TUPLES = (
    "chunk",
    "dsplit",
    "hsplit",
    "split",
    "split_with_sizes",
    "tensor_split",
    "unbind",
    "unsafe_chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "vsplit",
)
# Methods whose result is a view if the memory allows it, and a copy otherwise. (contiguous,
# resolve_conj and resolve_neg return the tensor itself or a copy: nothing to do.)
_MAYBE = (
    "conj",
    "flatten",
    "new",
    "ravel",
    "reshape",
    "reshape_as",
    "resize",
    "resize_as",
    "slice_inverse",
)
# Methods that end in an underscore and write no element: they change sizes and strides,
# which travel exactly, since they are read off the tensor when it is sent.
_METADATA = frozenset(
    (
        "as_strided_",
        "detach_",
        "requires_grad_",
        "resize_",
        "resize_as_",
        "set_",
        "share_memory_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    )
)
_OPERATORS = (
    "__iadd__",
    "__iand__",
    "__idiv__",
    "__ifloordiv__",
    "__ilshift__",
    "__imod__",
    "__imul__",
    "__ior__",
    "__ipow__",
    "__irshift__",
    "__isub__",
    "__itruediv__",
    "__ixor__",
)


def _view(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def view(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = method(self, *args, **kwargs)
        # The tensor is new and nobody else has it: giving it its class costs 0.05 us,
        # as_subclass 0.8. Compiled code sees regular tensors.
        if not is_compiling():
            result.__class__ = type(self)
        return result

    return view


def _tuple(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def views(self: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = method(self, *args, **kwargs)
        if not is_compiling():
            kind = type(self)
            for result in results:
                result.__class__ = kind
        return results

    return views


def _maybe(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def view_or_copy(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = method(self, *args, **kwargs)
        if not is_compiling() and result.untyped_storage() is self.untyped_storage():
            result.__class__ = type(self)
        return result

    return view_or_copy


def _max(tensor: Tensor) -> Tensor:
    return Tensor.any(tensor)


def _min(tensor: Tensor) -> Tensor:
    return Tensor.all(tensor)


def _aminmax(tensor: Tensor, *, keepdim: bool = False, **_: object) -> Any:
    ends = (Tensor.all(tensor), Tensor.any(tensor))
    if keepdim:
        ends = (ends[0].view((1,) * tensor.dim()), ends[1].view((1,) * tensor.dim()))
    return torch.return_types.aminmax(ends)


def _of_bool(name: str, serve: Callable[..., Any]) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def reduce(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        # torch's own kernels for bool want an address to write to, though they only read.
        if (
            self.dtype is torch.bool
            and not args
            and (not kwargs or (name == "aminmax" and kwargs.get("dim") is None))
            and self.numel()
        ):
            return serve(self, **kwargs)
        return method(self, *args, **kwargs)

    return reduce


def _guarded(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def write(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            refuse_write(self, f"x.{name}()" if name[0] != "_" else f"x.{name}")
            if torch.is_grad_enabled():
                refuse_gradients((*args, *kwargs.values()), name)
        return method(self, *args, **kwargs)

    return write


def keeping_bounds(method: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a method that changes a tensor's sizes or storage; undo that if it raises.

    torch sets the sizes first and finds then that the storage cannot grow: the tensor would
    read beyond its memory from then on.
    """
    before = (
        tensor.untyped_storage(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
    )
    try:
        return method(tensor, *args, **kwargs)
    except RuntimeError:
        Tensor.set_(tensor, *before)
        raise


def _resizing(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def resize(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return keeping_bounds(method, self, *args, **kwargs)

    return resize


def refuse_gradients(values: Any, what: str) -> None:
    """Raise if a value that is about to be written requires gradients.

    Raises
    ------
    GradientError
        The tensor would require gradients from then on.
    """
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            raise GradientError(
                f"{what} would make a memory-mapped tensor require gradients, which it cannot. "
                "Write value.detach(), or do it under torch.no_grad()."
            )


def _property(name: str, method: Callable[[Tensor], Tensor], doc: str) -> property:
    def get(self: Tensor) -> Tensor:
        result = method(self)
        if not is_compiling() and result is not self:
            result.__class__ = type(self)
        return result

    get.__name__ = name
    return property(get, doc=doc)


def _reversed(tensor: Tensor) -> Tensor:
    # Through t(): Dynamo calls itself without end on Tensor.T.__get__.
    if tensor.dim() == 2:
        return Tensor.t(tensor)
    return Tensor.permute(tensor, tuple(range(tensor.dim() - 1, -1, -1)))


def _matrix_transpose(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2:
        return Tensor.mT.__get__(tensor)  # type: ignore[attr-defined,no-any-return]  # torch's error
    return Tensor.transpose(tensor, -2, -1)


def _hermitian(tensor: Tensor) -> Tensor:
    if tensor.dim() == 2:
        return Tensor.adjoint(tensor)
    return Tensor.H.__get__(tensor)  # type: ignore[attr-defined,no-any-return]  # torch's error


def _conjugate_transpose(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2:
        return Tensor.mH.__get__(tensor)  # type: ignore[attr-defined,no-any-return]  # torch's error
    return Tensor.adjoint(tensor)


_PROPERTIES: tuple[tuple[str, Callable[[Tensor], Tensor], str], ...] = (
    ("T", _reversed, "The tensor with its dimensions reversed: a view."),
    ("mT", _matrix_transpose, "The tensor with its last two dimensions swapped: a view."),
    ("H", _hermitian, "The conjugate transpose of a matrix: a view."),
    ("mH", _conjugate_transpose, "The conjugate transpose of the last two dimensions: a view."),
    ("real", torch.real, "The real part: a view."),
    ("imag", torch.imag, "The imaginary part of a complex tensor: a view."),
)


def install(kind: type[Tensor]) -> None:
    """Give a subclass of `torch.Tensor` the methods of the table.

    Methods that the class defines itself stay as they are.
    """
    for name in ("resize_", "resize_as_"):
        setattr(kind, name, _resizing(name))
    for names, make in ((_VIEWS, _view), (_TUPLES, _tuple), (_MAYBE, _maybe)):
        for name in names:
            if name not in vars(kind):
                setattr(kind, name, make(name))
    for name, serve in (("max", _max), ("min", _min), ("aminmax", _aminmax)):
        setattr(kind, name, _of_bool(name, serve))
    for name, method, doc in _PROPERTIES:
        setattr(kind, name, _property(name, method, doc))
    for name in (*_writing_methods(), *_OPERATORS):
        if hasattr(Tensor, name) and name not in vars(kind):
            setattr(kind, name, _guarded(name))


def _writing_methods() -> list[str]:
    """Return the public methods of `torch.Tensor` that write to it, by torch's naming rule."""
    return [
        name
        for name in dir(Tensor)
        if name.endswith("_")
        and not name.startswith("_")
        and name not in _METADATA
        and callable(getattr(Tensor, name))
    ]
