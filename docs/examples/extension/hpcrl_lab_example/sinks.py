"""A sink: one row a step in a CSV file."""

import csv
from collections.abc import Mapping, Sequence

from hpcrl.runs.outlets.interface import RunInfo


class CsvSink:
    """Appends chosen metrics to ``sinks/FILE`` in the run directory; what a step does not have is left empty."""

    def __init__(
        self, *, columns: Sequence[str] = ("reward_mean", "loss", "entropy"), file: str = "metrics.csv"
    ) -> None:
        self._columns, self._file = list(columns), file

    def open(self, run: RunInfo) -> None:
        """Open the file; its head is written once."""
        path = run.directory / "sinks" / self._file
        new = not path.exists()
        self._stream = path.open("a", newline="")
        self._writer = csv.writer(self._stream)
        if new:
            self._writer.writerow(["step", *self._columns])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row."""
        self._writer.writerow([step, *(metrics.get(name, "") for name in self._columns)])
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
