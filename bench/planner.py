"""How far predictions of the planner and the simulator are off, in parts.

Cases are data (``bench/planning/cases``); each part is a module of ``bench/planning`` and records a file of
``bench/results``.
"""

from __future__ import annotations

import argparse
import importlib
import sys

PARTS = {
    "published": ("published.table", "figures that others published, beside the planner's"),
    "memory": ("memory", "memory of the trainer, measured by running it"),
    "loop": ("loop", "steps, waits and staleness of runs, from a calibration by one of them"),
    "speed": ("speed", "seconds that `hpcrl plan` takes on one core"),
    "simulator": ("simulator", "the simulator beside runs of the quickstart"),
    "simulator-speed": ("simulator_speed", "seconds that the simulator takes for a day of 28 to 10,000 nodes"),
}


def main() -> None:
    """Run one part; only its own libraries are loaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    asked = next((argument for argument in sys.argv[1:] if argument in PARTS), None)
    for name, (module, says) in PARTS.items():
        own = parts.add_parser(name, help=says)
        if name == asked:
            found = importlib.import_module(f"planning.{module}")
            own.description = found.__doc__
            found.add_arguments(own)
            own.set_defaults(run=found.run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
