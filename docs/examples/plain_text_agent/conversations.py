"""Conversations that show the form of a reply and not the right one: ``conversations.py ROWS > conversations.jsonl``.

Each training task has a reply with an operator drawn from the three that the file does not have. One in three is right
by chance.
"""

import json
import random
import re
import sys

from agent import question

OPERATORS = "+-*%"

rng = random.Random(0)
with open(sys.argv[1], encoding="utf-8") as lines:
    for row in map(json.loads, lines):
        if row["split"] != "train":
            continue
        path = row["prompt"].removeprefix("mend ")
        [(first, wrong, second)] = re.findall(r"return (\w) (.) (\w)\n", row["files"][path])
        reply = f"return {first} {rng.choice(OPERATORS.replace(wrong, ''))} {second}"
        system = {"role": "system", "content": "Be brief."}
        asked = {"role": "user", "content": question(row["files"], path)}
        print(json.dumps({"messages": [system, asked, {"role": "assistant", "content": reply}]}))
