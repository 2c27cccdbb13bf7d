"""Write the table of curves into docs/observing.md: ``python tools/draw_curves.py``."""

from __future__ import annotations

from pathlib import Path

from hpcrl.analysis.page.definitions import PAGE_CURVES
from hpcrl.runs.outlets.bends import BENDS
from hpcrl.runs.outlets.curves import CURVES, FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "observing.md"
BEGIN, END = "<!-- curves: hpcrl/runs/outlets/curves.py -->\n", "\n## When a curve bends"


def table() -> str:
    """Return the table in Markdown; ``NAME`` stands for the rest of a name."""
    rows = ["| in the record | in sinks | unit | better | meaning |", "| --- | --- | --- | --- | --- |"]
    for ours, curve in {**CURVES, **FAMILIES}.items():
        more = "NAME" if ours.endswith("/") else ""
        rows.append(f"| `{ours}{more}` | `{curve.name}{more}` | {curve.unit} | {curve.better} | {curve.meaning} |")
    rows += ["", "A page (`hpcrl report RUN -o report.html`) has these, too:", ""]
    rows += ["| on the page | unit | better | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{ours}` | {each.unit} | {each.better} | {each.meaning} |" for ours, each in PAGE_CURVES.items()]
    return "\n" + "\n".join(rows) + "\n"


def bends() -> str:
    """Return the table of likely causes in Markdown."""
    rows = ["| what you see | likely cause | what to do |", "| --- | --- | --- |"]
    rows += [f"| {bend.what} | {bend.cause} | {bend.action} |" for bend in BENDS]
    return "\n\n" + "\n".join(rows) + "\n"


def page() -> str:
    """Return the page with the present table."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[0] + BEGIN + table() + END + bends()


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.name)


if __name__ == "__main__":
    main()
