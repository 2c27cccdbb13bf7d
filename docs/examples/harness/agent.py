"""A program that plays a game with the policy, by OpenAI's client. See docs/environments.md, "Bring a program"."""

import json
import os
import re
import sys

from openai import OpenAI

task = json.load(sys.stdin)
secret, client, messages = task["row"]["secret"], OpenAI(), list(task["messages"])
number = guesses = 0
while number != secret and guesses < 7:
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    text = answer.choices[0].message.content or ""
    found = re.findall(r"\d{1,9}", text)
    number, guesses = int(found[-1]) if found else 0, guesses + 1
    messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": "higher" if number < secret else "lower"})
right = float(number == secret)
print(json.dumps({"reward": right * (1.1 - guesses / 10), "parts": {"right": right, "guesses": guesses}}))
