"""The process of one try to send a message: ``python -m hpcrl.runs.outlets.notify < request.json``.

It prints one JSON document (`hpcrl.runs.outlets.notices.delivery.TryResult`). Everything else that it or foreign code
prints goes to its standard error, without the secrets that it has read.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from hpcrl.config.outlets import NotifierConfig
from hpcrl.errors import HpcrlError
from hpcrl.processes.procfs import die_with_parent
from hpcrl.runs.outlets.interface import Notice, NotSentError, RefusedNoticeError, UnknownOutcomeError
from hpcrl.runs.outlets.making import make_notifier
from hpcrl.runs.outlets.secrets import scrubbed


def read_notice(document: dict[str, Any]) -> Notice:
    """Return the message of a document that `Notice.document` made."""
    return Notice(
        id=document["id"],
        event=document["event"],
        name=document["run"],
        directory=Path(document["directory"]),
        attempt=document["attempt"],
        step=document["step"],
        time_s=document["time_s"],
        title=document["title"],
        why=tuple(document["why"]),
    )


def try_notice(config: NotifierConfig, notice: Notice) -> dict[str, Any]:
    """Make the notifier, call it once, and return what became of the message."""
    outcome, after_s = "sent", 0.0
    why = ""
    try:
        make_notifier(config).notify(notice)
    except NotSentError as error:
        outcome, why, after_s = "again", str(error), error.after_s
    except UnknownOutcomeError as error:
        outcome, why = "unknown", str(error)
    except (RefusedNoticeError, HpcrlError) as error:
        outcome, why = "failed", str(error)
    except Exception as error:  # noqa: BLE001 - code of other packages
        print(scrubbed(traceback.format_exc()), file=sys.stderr)
        outcome, why = "failed", f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "why": scrubbed(why), "after_s": after_s}


def main() -> int:
    """Try once."""
    die_with_parent()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # foreign code may print
    document = json.load(sys.stdin.buffer)
    config = NotifierConfig.model_validate_json(json.dumps(document.pop("notifier")))
    result = try_notice(config, read_notice(document))
    if result["outcome"] != "sent":
        print(f"{document['id']}: {result['outcome']}: {result['why']}", file=sys.stderr)
    with answer:
        json.dump(result, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
