"""What all tests share."""

from __future__ import annotations

import signal

# A shell starts background commands with SIGINT ignored, and children inherit that: then no Ctrl-C test could
# work. A handler, unlike "ignore", is set back to the default in every child.
signal.signal(signal.SIGINT, signal.default_int_handler)
