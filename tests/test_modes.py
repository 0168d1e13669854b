"""The table of modes."""

import mmap
import os

import pytest

from mmtensor import ModeError
from mmtensor.modes import MODES, resolve_mode


@pytest.mark.parametrize("name", ["r", "r+", "c"])
def test_no_mode_creates_or_truncates(name):
    """Opening in any mode neither creates nor truncates nor appends, and forks close it."""
    flags = resolve_mode(name).open_flags
    assert flags & (os.O_CREAT | os.O_TRUNC | os.O_APPEND) == 0
    assert flags & os.O_CLOEXEC


def test_only_one_mode_reaches_the_file():
    """``r+`` alone opens for writing and maps shared pages."""
    writers = {name for name, mode in MODES.items() if mode.open_flags & os.O_RDWR}
    shared = {name for name, mode in MODES.items() if mode.map_flags & mmap.MAP_SHARED}
    assert writers == shared == {name for name, mode in MODES.items() if mode.shared} == {"r+"}


def test_only_one_mode_is_read_only():
    """``r`` alone gives arrays that cannot be written to."""
    assert {name for name, mode in MODES.items() if not mode.writeable} == {"r"}


@pytest.mark.parametrize(
    "mode", ["", "w", "w+", "R", "rb", "r ", "readonly", b"r", 0, True, [], None]
)
def test_unknown_modes(mode):
    """Anything else is a ModeError that says what each mode means."""
    with pytest.raises(ModeError, match=r'must be "r" \(read-only\), "r\+" .* or "c"'):
        resolve_mode(mode)
