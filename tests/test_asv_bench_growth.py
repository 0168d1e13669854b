"""The numbers that growth curves come down to; nothing is measured here."""

import pytest

pytest.importorskip("asv_bench", reason="not in the source distribution")

from asv_bench import offline
from asv_bench.growth.curves import (
    FLAT,
    KEPT,
    LINEAR,
    SHARED,
    Curve,
    Figure,
    Panel,
    Settings,
    show_bytes,
)
from asv_bench.growth.report import ends, missed, rows, write


def test_flat_compares_the_slowest_point_with_the_fastest():
    """The order of the points does not matter."""
    assert FLAT.number({1: 2.0, 8: 1.0, 64: 3.0}) == 3
    assert FLAT.holds(1.5)
    assert not FLAT.holds(1.51)


def test_linear_compares_the_time_for_each():
    """Time in proportion to the size gives 1."""
    assert LINEAR.number({10: 1.0, 30: 9.0, 1000: 100.0}) == 1
    assert LINEAR.number({10: 1.0, 1000: 200.0}) == 2


def test_shared_compares_one_worker_with_two():
    """What more workers do is drawn and not judged."""
    assert SHARED.number({1: 3.0, 2: 1.5, 4: 9.0}) == 2
    assert not SHARED.holds(1.4)


def test_kept_is_the_most_that_came_on_top():
    """It counts from the first point on, also where the last is lower."""
    assert KEPT.number({0: 10.0, 1: 150.0, 2: 20.0}) == 140
    assert str(KEPT) == "≤ 100 MB"


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1 B"), (1 << 10, "1 KB"), (1 << 29, "512 MB"), (1 << 36, "64 GB")]
)
def test_bytes_are_shown_by_powers_of_1024(value, text):
    """Gigabytes are the largest unit."""
    assert show_bytes(value) == text


def test_quick_keeps_the_first_and_the_last_size():
    """Every second one between them is left out."""
    assert Settings(5, quick=True).sizes(1, 2, 3, 4) == [1, 3, 4]
    assert Settings(5, quick=False).sizes(1, 2, 3, 4) == [1, 2, 3, 4]


def test_a_row_has_the_numbers_of_all_libraries():
    """A curve that ends early says where, and the reason is listed."""
    curves = [
        Curve("mmtensor", {1024: 1e-6, 2048: 2e-6}),
        Curve("peer", {1024: 1e-6, 1536: 1e-5}, "no memory"),
    ]
    figure = Figure("files", "Files", [Panel("open", "size", curves, FLAT, x_unit="B")])
    [row] = rows(figure)
    assert row == (
        "| open | size | slowest ÷ fastest point | 2.00× | ≤ 1.5× | **missed** "
        "| 1 µs at 1 KB | 2 µs at 2 KB | peer 10× (to 1.5 KB) |"
    )
    assert ends(figure) == ["open, peer after 1.5 KB: no memory"]
    assert missed(figure) == ["files: open"]


def test_the_page_keeps_what_is_around_the_marks(tmp_path):
    """Only what is between them is replaced, also the second time."""
    page = tmp_path / "growth.md"
    page.write_text("before\n<!-- growth: begin -->\nold\n<!-- growth: end -->\nafter\n")
    for text in ("first", "second"):
        write(page, text)
    assert page.read_text() == (
        "before\n<!-- growth: begin -->\n\nsecond\n\n<!-- growth: end -->\nafter\n"
    )


def test_the_site_asks_for_files_beside_it():
    """Foreign scripts and style sheets are replaced, others stay."""
    rewritten = offline._TAG.sub(
        offline._rewritten,
        '<script src="https://code.jquery.com/jquery-3.3.1.min.js" integrity="x"></script>'
        '<script src="asv.js"></script>',
    )
    assert rewritten == (
        '<script src="vendor/jquery/dist/jquery.min.js" onerror="js_load_failure()"></script>'
        '<script src="asv.js"></script>'
    )


def test_a_script_that_is_not_known_ends_the_program():
    """Another version of asv may ask for other files."""
    with pytest.raises(SystemExit, match="https://example.com/new.js"):
        offline._TAG.sub(offline._rewritten, '<script src="https://example.com/new.js"></script>')
