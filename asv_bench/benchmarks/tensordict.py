"""The container: indexing it, its keys, its lock, in memory and on files.

Where a row has a limit, that is the same with a dict of regular tensors.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import tensordict
import torch

import mmtensor

from .common import Expression, FreshFile, values

# tensordict says with each call that its next version will do more here.
warnings.filterwarnings("ignore", r"as_tensor\(\) keeps", FutureWarning)


class _Container(Expression):
    """An expression in `x`, a container, against one in a dict of regular tensors."""

    dict_code: ClassVar[str | None] = None
    limit_is = "a dict of regular tensors"

    def source(self) -> Any:
        """Return what the container is made from."""
        raise NotImplementedError

    def make(self, kind: Any) -> Any:
        """Return the container of a library."""
        raise NotImplementedError

    def bind(self, x: Any, code: str | None = None) -> Callable[[], Any]:
        """Return a function that evaluates the expression."""
        function = super().bind(x, code)
        self.names["ids"] = torch.tensor([2, 0])
        self.names["value"] = values(*self.shape)
        return function

    def mmtensor(self) -> Callable[[], Any]:
        """On a container of mmtensor."""
        return self.bind(self.make(mmtensor.TensorDict))

    def tensordict(self) -> Callable[[], Any]:
        """On a container of tensordict."""
        return self.bind(self.make(tensordict.TensorDict))

    def torch(self) -> Callable[[], Any]:
        """On a dict of regular tensors."""
        if self.dict_code is None:
            raise NotImplementedError("a dict has no such method")
        return self.bind(self.source(), self.dict_code)


class _MemmapTd(_Container):
    """30 leaves on files, all of them in the batch."""

    shape = (3, 40)

    def source(self) -> dict[str, torch.Tensor]:
        """Return the leaves in memory."""
        return {str(number): values(*self.shape).clone() for number in range(30)}

    def make(self, kind: Any) -> Any:
        """Return the container of a library, on files."""
        return kind(self.source(), [3, 40]).memmap_(self.new_path())


class MemmapTdIndex(_MemmapTd):
    """One element, as a view."""

    title = "`td[0]`, 30 leaves on files"
    code = "x[0]"
    dict_code = "{key: leaf[0] for key, leaf in x.items()}"


class MemmapTdIndexAsTensor(_MemmapTd):
    """One element with regular tensors on the same memory."""

    title = "`td[0].as_tensor()`, 30 leaves on files"
    code = "x[0].as_tensor()"
    dict_code = MemmapTdIndex.dict_code


class MemmapTdIndexOp(_MemmapTd):
    """An operation on one element."""

    title = "`td[0].apply(lambda x: x + 1)`, 30 leaves on files"
    code = "x[0].apply(lambda leaf: leaf + 1)"
    dict_code = "{key: leaf[0] + 1 for key, leaf in x.items()}"


class MemmapTdUnbind(_MemmapTd):
    """All elements, as views."""

    title = "`td.unbind(0)`, 30 leaves on files"
    code = "x.unbind(0)"
    dict_code = "[{key: leaf[i] for key, leaf in x.items()} for i in range(3)]"


class MemmapTdGather(_MemmapTd):
    """Some elements, copied."""

    title = "`td[ids]`, 30 leaves on files"
    code = "x[ids]"
    dict_code = "{key: leaf[ids] for key, leaf in x.items()}"


class MemmapTdIndexKey(_MemmapTd):
    """One leaf of one element."""

    title = '`td[i]["key"]`, 30 leaves on files'
    code = 'x[1]["7"]'
    dict_code = 'x["7"][1]'


class MemmapTdView(_MemmapTd):
    """The batch dimensions in another shape."""

    title = "`td.view(120)`, 30 leaves on files"
    code = "x.view(120)"
    dict_code = "{key: leaf.view(120) for key, leaf in x.items()}"


class MemmapTdTranspose(_MemmapTd):
    """Two batch dimensions swapped."""

    title = "`td.transpose(0, 1)`, 30 leaves on files"
    code = "x.transpose(0, 1)"
    dict_code = "{key: leaf.transpose(0, 1) for key, leaf in x.items()}"


def _nested() -> dict[str, Any]:
    leaf = values(3, 4, 5)
    inner = {key: leaf.clone() for key in "xy"}
    outer = {"u": leaf.clone(), "v": leaf.clone(), "inner": inner}
    return {**{key: leaf.clone() for key in "abcde"}, "nested": outer}


class _Regular(_Container):
    """Nine leaves in memory, four of them nested."""

    shape = (3, 4, 5)

    def source(self) -> dict[str, Any]:
        """Return the leaves."""
        return _nested()

    def make(self, kind: Any) -> Any:
        """Return the container of a library."""
        return kind(self.source(), [3, 4])


class GetKey(_Regular):
    """A leaf."""

    title = '`td["a"]`'
    code = dict_code = 'x["a"]'


class GetNested(_Regular):
    """A leaf two containers down."""

    title = '`td["nested", "inner", "x"]`'
    code = 'x["nested", "inner", "x"]'
    dict_code = 'x["nested"]["inner"]["x"]'


class Set(_Regular):
    """Another tensor in the place of a leaf."""

    title = '`td.set("a", value)`'
    code = 'x.set("a", value)'


class SetInPlace(_Regular):
    """Another value in the memory of a leaf."""

    title = '`td.set_("a", value)`'
    code = 'x.set_("a", value)'
    dict_code = 'x["a"].copy_(value)'


class SetInPlaceShared(_Regular):
    """The same in shared memory."""

    title = '`td.set_("a", value)`, shared'
    code = 'x.set_("a", value)'

    def make(self, kind: Any) -> Any:
        """Return the container of a library, in shared memory."""
        return super().make(kind).share_memory_()


class SetShared(_Regular):
    """A copy that is moved to shared memory."""

    title = "`td.clone().share_memory_()`"
    code = "x.clone().share_memory_()"


class Select(_Regular):
    """Some of the keys, a nested one among them."""

    title = '`td.select("a", ("nested", "u"))`'
    code = 'x.select("a", ("nested", "u"))'


class Exclude(_Regular):
    """All keys but some."""

    title = '`td.exclude("a", ("nested", "u"))`'
    code = 'x.exclude("a", ("nested", "u"))'


class FlattenKeys(_Regular):
    """One level of keys instead of three."""

    title = "`td.flatten_keys()`"
    code = "x.flatten_keys()"


class UnflattenKeys(_Regular):
    """Three levels of keys instead of one."""

    title = "`td.unflatten_keys()`"
    code = "x.unflatten_keys()"

    def make(self, kind: Any) -> Any:
        """Return the container of a library, flattened."""
        return super().make(kind).flatten_keys()


class Clone(_Regular):
    """A copy of everything."""

    title = "`td.clone()`"
    code = "x.clone()"


class CloneShallow(_Regular):
    """Another container with the same leaves."""

    title = "`td.clone(False)`"
    code = "x.clone(False)"


class View(_Regular):
    """The batch dimensions in another shape."""

    title = "`td.view(12)`"
    code = "x.view(12)"


class Transpose(_Regular):
    """Two batch dimensions swapped."""

    title = "`td.transpose(0, 1)`"
    code = "x.transpose(0, 1)"


class Unbind(_Regular):
    """All elements, as views."""

    title = "`td.unbind(0)`"
    code = "x.unbind(0)"


class Construct(_Regular):
    """A container from nested dicts."""

    title = "`TensorDict({...}, [3, 4])`"
    code = "x(source, [3, 4])"

    def bind(self, x: Any, code: str | None = None) -> Callable[[], Any]:
        """Return a function that evaluates the expression."""
        function = super().bind(x, code)
        self.names["source"] = self.source()
        return function

    def make(self, kind: Any) -> Any:
        """Return the class itself."""
        return kind


class Lock(FreshFile):
    """Keys that cannot change from now on."""

    title = "`td.lock_()`"
    locked: ClassVar[bool] = False

    def before(self, library: str) -> Any:
        """Make a container."""
        kind = {"mmtensor": mmtensor.TensorDict, "tensordict": tensordict.TensorDict}[library]
        made = kind(_nested(), [3, 4])
        return made.lock_() if self.locked else made

    def after(self, argument: Any) -> None:
        """There is no file."""

    def use(self) -> Callable[[Any], Any]:
        """Return what is timed."""
        return lambda td: td.lock_()

    mmtensor = tensordict = use


class Unlock(Lock):
    """Keys that can change again."""

    title = "`td.unlock_()`"
    locked = True

    def use(self) -> Callable[[Any], Any]:
        """Return what is timed."""
        return lambda td: td.unlock_()

    mmtensor = tensordict = use
