"""What an import costs, each measured in a fresh interpreter."""

from typing import Any, ClassVar

_STATEMENTS = {
    "mmtensor": "import mmtensor",
    "tensordict": "import tensordict",
    "mmap_ninja": "import mmap_ninja",
    "safetensors": "import safetensors.torch",
    "numpy": "import numpy",
    "torch": "import torch",
    "limit": "import numpy, ml_dtypes",
}


class Import:
    """``import mmtensor`` against its floor: the imports it cannot do without.

    asv runs the returned code in a new interpreter, so each figure is a cold start of
    Python modules with a warm page cache.
    """

    title = "import"
    limit_is = "`import numpy, ml_dtypes`"
    limit_column = "limit"
    params: ClassVar[list[Any]] = [list(_STATEMENTS)]
    param_names: ClassVar[list[str]] = ["library"]

    def timeraw_import(self, library: str) -> str:
        """Return the code that is timed."""
        return _STATEMENTS[library]
