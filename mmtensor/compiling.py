"""What `torch.compile` is told when it meets a tensor on a mapping.

Dynamo asks a storage for its size when it first sees a tensor, and that is the only Python
of ours that runs between the user's call and the compiled code. Where torch has moved what
is read here, nothing happens, and compiled code raises its own, less clear error.
"""

import sys
from typing import Any

from mmtensor.mapping import Mapping

__all__ = ["about_to_compile", "make_before"]

# Backends that run torch's operators, which read from read-only storages; all others
# generate code, which asks for an address to write to.
_RUN_OPERATORS = ("eager", "aot_eager")
# Modules whose functions are called by methods, and are not Dynamo's business; those that it has
# been told about are taken out.
_BENEATH = [
    "allocation",
    "arrays",
    "bridge",
    "copying",
    "indexing",
    "mapping",
    "pages",
    "prefetch",
    "storage",
]


def about_to_compile(mapping: Mapping) -> None:
    """Prepare `torch.compile` for a tensor on a mapping, if that is what is going on.

    Raises
    ------
    torch._dynamo.exc.Unsupported
        If the mapping is read-only and the backend generates code. Dynamo takes it as a
        graph break: what uses the tensor runs uncompiled. With ``fullgraph=True`` it is the
        error that the user sees.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    frame = getattr(getattr(dynamo, "tls", None), "current_tx", None)
    if frame is None:
        return
    # The check of custom operators, which goes on during the first call of compiled code,
    # refuses every tensor subclass (TypeError: Multiple dispatch failed): with it,
    # `torch.compile(lambda x: x @ x)` fails once, and then never again. It has no switch
    # other than this one.
    config: Any = sys.modules.get("torch._functorch.config")
    if getattr(config, "check_custom_op_aliasing", False):
        config.check_custom_op_aliasing = False
    _let_comparisons_end(frame)
    _leave_alone()
    if mapping.mode.writeable or getattr(frame, "export", False):
        return
    backend = getattr(getattr(frame, "output", None), "compiler_fn", None)
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
    if name not in _RUN_OPERATORS:
        raise sys.modules["torch._dynamo.exc"].Unsupported(
            f"torch.compile cannot generate code ({name or 'unknown backend'}) for a read-only "
            f'tensor: its {_what(mapping)} was opened with mode "r", and generated code asks '
            'for an address to write to. Open it with mode="c" (private pages, no copy), or '
            "pass a copy: x.clone(). Without fullgraph=True, what uses it runs uncompiled."
        )


def _let_comparisons_end(frame: Any) -> None:
    """Give Dynamo the name of the class that comparisons of a subclass have.

    ``x > 3`` is a plain tensor, which Dynamo takes for one of a subclass called Tensor. Where it
    outlives a graph break, as in ``x[x > 3]``, the code looks that class up under a global name
    that is made for subclasses seen as inputs only (torch 2.13: NameError).
    """
    try:
        name = sys.modules["torch._dynamo.utils"].get_safe_global_name(
            frame, "__subclass_Tensor", sys.modules["torch"].Tensor
        )
        if name not in frame.output.global_scope:
            frame.output.install_global_unsafe(name, sys.modules["torch"].Tensor)
    except (AttributeError, KeyError, TypeError):
        pass  # torch has moved it


def _leave_alone() -> None:
    """Let Dynamo not compile what runs beneath a method, after a graph break.

    It takes an array for its own kind there, which one on a mapping is not.
    """
    try:
        rules: Any = sys.modules["torch._dynamo.trace_rules"]
        while _BENEATH:
            rules.add(f"mmtensor.{_BENEATH[-1]}")
            _BENEATH.pop()
    except (AttributeError, KeyError):
        pass  # torch has moved it


def _what(mapping: Mapping) -> str:
    return f"file {mapping.path!r}" if mapping.path else "array"


def make_before(context: Any) -> None:
    """Let Dynamo begin again after late leaves were made, which compiled code cannot do.

    For `torch._dynamo.comptime.comptime`, from a method of the leaves.

    Raises
    ------
    torch._dynamo.exc.RestartAnalysis
        Dynamo takes it as the order to begin again, and finds the leaves then.
    torch._dynamo.exc.Unsupported
        Where torch has moved what is needed: the code runs uncompiled.
    """
    errors = sys.modules["torch._dynamo.exc"]
    try:
        leaves = context.get_local("self")._ComptimeVar__variable.value
        log = context._ComptimeContext__tx.speculation_log
    except AttributeError:
        raise errors.Unsupported("the leaves of a TensorDict have to be made first") from None
    leaves.make_all()
    log.clear()  # what was speculated on the way here would not happen again
    raise errors.RestartAnalysis(restart_reason="leaves were made")
