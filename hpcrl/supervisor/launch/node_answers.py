"""``python -m hpcrl.supervisor.launch.node_answers``: one task on each node of a job, before roles are started.

It reports the addresses of its node, then answers each line of its stdin with the time of its clock, until stdin is
closed. Both directions are JSON lines, and its own carry a mark; `hpcrl.supervisor.launch.survey` is the other side.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from hpcrl.network.interfaces import address_towards, interface_addresses, machine_id
from hpcrl.supervisor.process.report_lines import encode_line


def main() -> None:
    """Answer questions until the input is closed."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    _say({"node": node, "machine": machine_id(), "interfaces": interface_addresses()})
    # not `for line in sys.stdin`, which reads ahead: the answer's time would be late
    while line := sys.stdin.buffer.readline():
        now_s = time.time()
        question = json.loads(line)
        answer = {"node": node, "number": question["number"], "time_s": now_s}
        if question.get("towards"):
            try:
                answer["towards"] = address_towards(question["towards"])
            except OSError as error:
                answer["problem"] = f"it has no route to {question['towards']}: {error}"
        _say(answer)


def _say(answer: dict[str, object]) -> None:
    # one write a line: srun joins the lines of all nodes
    os.write(1, encode_line(answer))


if __name__ == "__main__":
    main()
