"""The README's first program: a folder of JPEG files becomes memory maps to train from."""

import os
import re
import subprocess
import sys

import torch
from conftest import ROOT
from PIL import Image

from mmtensor import TensorDict

COUNT = 60


def test_images_keep_their_promises(tmp_path):
    """The program decodes, resizes and reads, prints a table, leaves a contact sheet."""
    sheet = tmp_path / "sheet.png"
    data = tmp_path / "data"
    data.mkdir()
    program = ROOT / "docs" / "examples" / "images.py"
    done = subprocess.run(
        [sys.executable, program, str(data), "--count", str(COUNT), "--sheet", str(sheet)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    assert done.stdout.count("  ok  ") == 3
    assert len(re.findall(r"^  .* \d+\.\d{3} +[\d,]+$", done.stdout, re.MULTILINE)) == 4
    assert f"{COUNT}/{COUNT}" in done.stderr

    images = TensorDict.load_memmap(data / "images", mode="r")
    assert len({tuple(row) for row in images["image"].shapes.tolist()}) > COUNT // 2
    small = TensorDict.load_memmap(data / "small", mode="r")
    assert small["image"].shape == (COUNT, 96, 96, 3)
    assert bool((small["image"].flatten(1).float().std(1) > 1).all())
    assert torch.equal(small["label"], images["label"])
    with Image.open(sheet) as picture:
        assert picture.size == (15 * 100 + 4, 4 * 100 + 4)
        assert len(picture.getcolors(1 << 20)) > 1000
