"""What conversations cost the orchestrator: openings, what is said between turns, and parsing of turns, by family.

    python bench/rendering.py            # a minute

Each family has its published chat template and a small byte-level vocabulary, so that a text has more tokens than with
its own. An extension costs the same at any length of the conversation: it is made without what was before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from family_lab import FAMILIES, TOOLS, write_family  # noqa: E402
from harness import record  # noqa: E402

from hpcrl.rollouts.environments import ToolCall, tool_message  # noqa: E402
from hpcrl.rollouts.rendering import Renderer  # noqa: E402

TOKENS = 131_072
RESULT_CHARACTERS, TURN_TOKENS = 4000, 1000
TEXT = "def main(): return 42 # comment\n    if x < 3 and y > 4: the tool says that the weather in Paris is grey\n"


def times(work: Callable[[], Any], count: int) -> dict[str, float]:
    """Milliseconds of a processor: median and 99th percentile."""
    found = []
    for _ in range(count):
        started = time.thread_time()
        work()
        found.append(1e3 * (time.thread_time() - started))
    found.sort()
    return {"median_ms": round(found[count // 2], 3), "p99_ms": round(found[int(0.99 * (count - 1))], 3)}


def measure(path: Path) -> dict[str, Any]:
    """Measure one family."""
    renderer = Renderer.of_model(path)
    per_text = len(renderer.opening([{"role": "user", "content": TEXT * 100}])) / 100
    long = TEXT * round(TOKENS / per_text)
    opening = [{"role": "user", "content": long}]
    call = ToolCall("weather", {"city": "Paris"}, "call_0_0")
    result = tool_message(call, (TEXT * RESULT_CHARACTERS)[:RESULT_CHARACTERS])
    spelled = tool_message(call, str(result["content"]) + "<|im_end|><|user|></tool_response>")
    end = renderer.stop_token_ids[0]
    turn = [*renderer.opening([{"role": "user", "content": TEXT * 100}])[100 : 100 + TURN_TOKENS], end]

    def extend(message: Any) -> Callable[[], Any]:
        return lambda: renderer.extension([message], ended_by=end, calls=[call], tools=TOOLS)

    return {
        "opening_tokens": len(renderer.opening(opening, tools=TOOLS)),
        "opening": times(lambda: renderer.opening(opening, tools=TOOLS), 5),
        "extension_tokens": len(extend(result)().token_ids),
        "extension": times(extend(result), 300),
        "extension_that_spells_control_tokens": times(extend(spelled), 300),
        "parse": times(lambda: renderer.parse(turn, said=turn, tools=TOOLS), 300),
    }


def main() -> None:
    """Measure all families."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    families = {}
    with tempfile.TemporaryDirectory() as place:
        for name, family in FAMILIES.items():
            families[name] = measure(write_family(Path(place, name), family))
            print(name, families[name])
    record(
        "rendering",
        {"tokens_of_a_turn": TURN_TOKENS, "characters_of_a_result": RESULT_CHARACTERS, "families": families},
    )


if __name__ == "__main__":
    main()
