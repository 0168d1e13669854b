"""Configuration of the documentation build: ``sphinx-build -W docs docs/_build/html``."""

import mmtensor

project = "mmtensor"
author = "The mmtensor developers"
project_copyright = "2026, The mmtensor developers"
version = release = mmtensor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mmtensor {release}"

# The pages use links to headings and tables; nothing else of MyST is needed.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# torch.Tensor has some 600 members. The pages list what this package adds.
numpydoc_show_class_members = False
