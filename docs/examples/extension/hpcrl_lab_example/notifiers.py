"""A notifier: a line in a file."""

from pathlib import Path

from hpcrl.runs.outlets.interface import Notice


class FileNotifier:
    """Appends a line to a file."""

    def __init__(self, *, path: str) -> None:
        self._path = Path(path)

    def notify(self, notice: Notice) -> None:
        """Write what happened, and why."""
        with self._path.open("a") as stream:
            stream.write(f"{notice.title}: {notice.why[0]}\n")
