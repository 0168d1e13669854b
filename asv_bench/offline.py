"""Let the site that `asv publish` writes open without the internet.

Its page asks content delivery networks for jQuery, flot and Bootstrap, and shows an error
where it does not reach them. This takes the same releases from the npm registry, puts them
beside the page, and lets the page ask for those. Needs `npm`. Usage, after each `asv publish`::

    python -m asv_bench.offline [DIRECTORY]
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

__all__ = ["main"]

_PACKAGES = (
    "blueimp-md5@2.19.0",
    "bootstrap@3.1.1",
    "flot-orderbars@1.0.0",
    "flot@0.8.3",
    "jquery@3.3.1",
    "stupid-table-plugin@1.1.3",  # the page asks for 1.0.1, which is not there
)
# The end of an address in the page, and the file of a package that it becomes.
_FILES = {
    "/jquery-3.3.1.min.js": "jquery/dist/jquery.min.js",
    "/flot/0.8.3/jquery.flot.min.js": "flot/jquery.flot.js",
    "/flot/0.8.3/jquery.flot.time.min.js": "flot/jquery.flot.time.js",
    "/flot/0.8.3/jquery.flot.selection.min.js": "flot/jquery.flot.selection.js",
    "/flot/0.8.3/jquery.flot.categories.min.js": "flot/jquery.flot.categories.js",
    "/jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "/stupidtable.min.js": "stupid-table-plugin/stupidtable.min.js",
    "/md5.min.js": "blueimp-md5/js/md5.min.js",
    "/bootstrap.min.js": "bootstrap/dist/js/bootstrap.min.js",
    "/bootstrap.min.css": "bootstrap/dist/css/bootstrap.min.css",
}
# A tag that asks for a foreign script or style sheet, up to its end.
_TAG = re.compile(r'<(script|link)\b[^>]*\b(src|href)="(https://[^"]+\.(?:js|css))"[^>]*>')


def _rewritten(tag: re.Match[str]) -> str:
    """Return a tag that asks for the file beside the page.

    Without the checksum: flot has no minified files in its package, and so another one.
    """
    kind, attribute, address = tag.groups()
    for end, file in _FILES.items():
        if address.endswith(end):
            relation = ' rel="stylesheet"' if kind == "link" else ' onerror="js_load_failure()"'
            return f'<{kind} {attribute}="vendor/{file}"{relation}>'
    sys.exit(f"The page asks for {address}, which this program does not know; asv has changed.")


def main(arguments: list[str] | None = None) -> None:
    """Fetch the packages and rewrite the page."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.offline")
    parser.add_argument(
        "directory",
        type=pathlib.Path,
        nargs="?",
        default=pathlib.Path(__file__).parent / "html",
        help="what `asv publish` has written",
    )
    directory = parser.parse_args(arguments).directory
    npm = shutil.which("npm")
    if npm is None:
        parser.error("npm was not found")
    page = directory / "index.html"
    text, count = _TAG.subn(_rewritten, page.read_text(encoding="utf-8"))
    if not count:
        print("The page asks for nothing from elsewhere: nothing to do.")
        return
    packages = directory / "packages"
    packages.mkdir(exist_ok=True)
    (packages / "package.json").write_text("{}")
    subprocess.run(
        [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", *_PACKAGES],
        cwd=packages,
        check=True,
    )
    for file in _FILES.values():
        target = directory / "vendor" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(packages / "node_modules" / file, target)
    shutil.rmtree(packages)
    page.write_text(text, encoding="utf-8")
    print(f"{count} addresses rewritten: {page} opens without the internet.")


if __name__ == "__main__":
    main()
