"""A program that mends a repository with a shell, by OpenAI's client. See docs/swe.md, "Programs"."""

import json
import os
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

from openai import OpenAI

task = json.load(sys.stdin)
found = task["row"]["files"]
for path, text in found.items():
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
command = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
shell = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": command}}
client, messages = OpenAI(), list(task["messages"])
for _ in range(8):
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[shell])
    said = answer.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    for call in said.tool_calls or ():
        try:
            script = json.loads(call.function.arguments)["command"]
            ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=10, check=False)
            result = ran.stdout + ran.stderr + (f"\n[exit code {ran.returncode}]" if ran.returncode else "")
        except (KeyError, TypeError, ValueError, subprocess.TimeoutExpired) as error:
            result = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result[:400] or "[no output]"})
    if not said.tool_calls:
        break
for path, text in found.items():
    now = Path(path).read_text(errors="replace") if Path(path).is_file() else ""
    print(*unified_diff(text.splitlines(True), now.splitlines(True), f"a/{path}", f"b/{path}"), sep="", end="")
