"""Draw the page of a run as a picture: ``python tools/draw_page.py RUN`` writes it into the docs.

The page is opened in a headless Chromium. The picture in the docs is that of a quickstart.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from headless_chromium import chromium_page

from hpcrl.analysis.page.write_html import write_page
from hpcrl.cli.selection import find
from hpcrl.storage.files import atomic_write

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/images/page.png"


async def picture(path: Path, *, width: int, height: int, dark: bool, section: str) -> bytes:
    """Return what a window shows of a page, from the top of a section on."""
    async with chromium_page() as page:
        await page.look(width, height, dark=dark)
        await page.open(path)
        go = f"document.getElementById({section!r}).scrollIntoView({{ behavior: 'instant' }})"
        await page.evaluate(go)
        return await page.picture()


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="names of runs, or their directories")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1060)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--section", default="overview", help="id of the section at the top")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = write_page([find(run, None) for run in wanted.runs], Path(directory) / "report.html")
        drawn = asyncio.run(
            picture(path, width=wanted.width, height=wanted.height, dark=wanted.dark, section=wanted.section)
        )
    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(wanted.output, drawn)
    print(wanted.output)


if __name__ == "__main__":
    main()
