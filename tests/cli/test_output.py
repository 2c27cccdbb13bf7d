"""Text of others reaches no terminal as a command, and no console as markup."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpcrl.cli.output import as_text, markup, say, say_raw, screen, table_console
from hpcrl.runs.views.logs import LogLine, format_line

ROOT = Path(__file__).resolve().parents[2]
EVIL = "\x1b]52;c;cm0=\x07\x1b[2J\x1b[1;1H\x9b2J\u202e\r[/] [bold]x[/bold] :smile: \x1b[31mred"
SHOWN = "\\x1b]52;c;cm0=\\x07\\x1b[2J\\x1b[1;1H\\u009b2J\\u202e\\r[/] [bold]x[/bold] :smile: \\x1b[31mred"
#: what rich itself writes: colours, and movements of a live view
_OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\d*[AKG]|\x1b\[\?25[lh]|\r")


def on_terminal(script: str) -> str:
    """What a script writes to a terminal of 200 columns."""
    main, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=child, stderr=child, env=environment)
    os.close(child)
    written = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the last one who writes has gone
            break
        written += piece
        if not piece:
            break
    os.close(main)
    assert process.wait() == 0, written
    return written.decode()


_SCRIPT = """
from rich.live import Live
from rich.progress import Progress, TextColumn
from rich.panel import Panel
from rich.console import Group
from rich.table import Table
from rich.text import Text
from hpcrl.cli.output import as_text, markup, say, screen, table_console

evil = {evil!r}
say(evil)
say(evil, err=True)
console = table_console()
console.print(evil)
console.print(evil, highlight=False, soft_wrap=True)
console.print(Text(evil, style="red"), Panel(evil), Group(Text(evil), evil))
console.print(markup("[bold]{{}}[/]: {{}}", evil, 1), as_text(evil))
table = Table(title=evil, caption=evil)
table.add_column(evil)
table.add_row(evil, Text(evil))
table.add_section()
console.print(table)
with Live(Group(evil, Text(evil), table), console=screen(err=True), refresh_per_second=4) as live:
    live.console.print(evil)
with Progress(TextColumn("{{task.description}}", markup=False), console=screen(err=True)) as progress:
    progress.add_task(evil)
console.rule(evil)
console.log(evil)
"""


def test_no_way_to_print_hands_control_characters_to_a_terminal() -> None:
    written = on_terminal(_SCRIPT.format(evil=EVIL))
    assert "\x1b[" in written  # it was taken for a terminal
    left = _OWN.sub("", written)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", left), left
    assert written.count("\\x1b]52;c;cm0=") > 10
    assert ":smile:" in left
    assert "[bold]x[/bold]" in left
    # a colour of the foreign text is shown, and not set
    assert "\x1b[31mred" not in written


def test_say_shows_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    say(EVIL, err=True, nl=False)
    say_raw("a b")
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\na b\n"
    assert err == SHOWN


def test_a_json_document_stays_equal(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"text": EVIL, "path": Path("/a").as_posix()}
    say(json.dumps(document, ensure_ascii=False, indent=2))
    assert json.loads(capsys.readouterr().out) == document


def test_consoles_take_text_for_text(capsys: pytest.CaptureFixture[str]) -> None:
    console = table_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("[/]", "[bold]name[/bold]", ":smile:")
    console.print(table)
    console.print(markup("[bold]{}[/]", "[/red]"), "[link=file:///etc/passwd]x[/link]")
    assert capsys.readouterr().out == "[/]  [bold]name[/bold]  :smile:\n[/red] [link=file:///etc/passwd]x[/link]\n"


def test_markup_styles_its_template_alone() -> None:
    text = markup("[bold]{}[/] is {}", "[red]a[/red]\x1b[2J", 7)
    assert text.plain == "[red]a[/red]\\x1b[2J is 7"
    assert [text.plain[span.start : span.end] for span in text.spans] == ["[red]a[/red]\\x1b[2J"]
    assert as_text("[bold]x[/bold]").plain == "[bold]x[/bold]"
    styled = Text("x", style="red")
    assert as_text(styled) is styled


def test_a_live_view_keeps_its_own_movements() -> None:
    console = screen()
    console.file = stream = io.StringIO()
    console._force_terminal = True
    with Live("one", console=console, auto_refresh=False) as live:
        live.update("two", refresh=True)
    assert "\x1b[" in stream.getvalue()


def test_lines_of_logs_are_shown_without_colours() -> None:
    line = LogLine(
        role="engine", replica=0, rank=1, attempt=1, time_s=0.0, line="\x1b[31mred\x1b[0m \x1b[2J \x07 [bold]"
    )
    assert format_line(line, as_json=False) == "engine 0.1 | red \\x1b[2J \\x07 [bold]"
    assert json.loads(format_line(line, as_json=True))["line"] == line.line


def test_commands_print_in_one_way() -> None:
    other = re.compile(
        r"typer\.echo\(|click\.echo\(|secho\(|(?<![\w.])print\(|\bConsole\(|sys\.std(out|err)\.write|from_markup\("
    )
    found = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*(ROOT / "hpcrl/cli").glob("*.py"), *(ROOT / "hpcrl/runs/views").glob("*.py")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path.name != "output.py" and other.search(line)
    }
    assert not found
