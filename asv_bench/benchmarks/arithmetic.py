"""What users do with every tensor, on a small one, where overhead shows."""

from .common import Expression


class AddOne(Expression):
    """An operation with a regular result."""

    title = "`x + 1`, 60 floats"
    code = numpy_code = "x + 1"


class Contiguous(Expression):
    """A method that returns the tensor itself."""

    title = "`x.contiguous()`"
    code = "x.contiguous()"
    numpy_code = "np.ascontiguousarray(x)"


class Stack(Expression):
    """A function of several tensors."""

    title = "`torch.stack([x, x])`, 60 floats"
    code = "torch.stack([x, x])"
    numpy_code = "np.stack([x, x])"


class Shape(Expression):
    """An attribute."""

    title = "`x.shape`"
    code = numpy_code = "x.shape"
