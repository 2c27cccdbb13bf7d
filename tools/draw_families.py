"""Write the table of families in docs/models.md: ``python tools/draw_families.py``, with what tests need installed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Read what tests are parametrised by, and write the table where it is not as it was."""
    # importing tests is how their cases are known: they are written out in many ways
    trainer = ROOT / "tests" / "trainer"
    rooms = [trainer, *(path for path in sorted(trainer.iterdir()) if path.is_dir())]
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, rooms)]
    from family_tables import with_table  # noqa: PLC0415 - found where the line above says

    page = ROOT / "docs" / "models.md"
    text = page.read_text(encoding="utf-8")
    if (made := with_table(text)) != text:
        page.write_text(made, encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
