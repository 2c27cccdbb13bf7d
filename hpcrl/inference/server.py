"""``python -m hpcrl.inference.server``: the embedded engine's name in the plans of runs from before it had a room."""

import sys

from hpcrl.inference.embedded.server import main

if __name__ == "__main__":
    sys.exit(main())
