"""A rank of a node, without a trainer: reads the blocks that it is told of, and says what it found.

``sharing_rank.py BASE LIMIT_BYTES AUTHORIZATION``; a JSON object a line on the standard input::

    {"location": [...], "payload": "...", "step": 1, "places": [...]}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.dock.warehouse.sharing import Sharing


def main() -> None:
    base, limit, authorization = sys.argv[1:]
    sharing, held = Sharing(Path(base), limit_bytes=int(limit)), list[list[memoryview]]()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        places = msgspec.convert(job["places"], list[PayloadPlace])
        location = msgspec.convert(job["location"], Location)
        reader = BlockReader(location, Path(job["payload"]), authorization=authorization)
        reader.share(sharing, job["step"])
        reader.prepare(places)
        # those of the last step are trained meanwhile
        held = [*held[-1:], [reader.read(place) for place in places]]
        reader.close()
        answer: dict[str, Any] = {"sources": reader.sources, "problems": reader.problems, "unshared": reader.unshared}
        print(json.dumps({**answer, "hashes": [xxhash.xxh3_128_hexdigest(block) for block in held[-1]]}), flush=True)
    sharing.close()


if __name__ == "__main__":
    main()
