"""A program that mends one line of a file by plain text, for models without tool calls. See docs/swe.md, "Programs"."""

import json
import os
import sys
from difflib import unified_diff
from urllib.request import Request, urlopen


def question(files: dict[str, str], path: str) -> str:
    """Return what the policy reads: the file, and the assertion at which pytest stops, the first of its test."""
    module, tests = path.removesuffix(".py"), files["tests/test_modules.py"]
    assertion = next(line.strip() for line in tests.splitlines() if f" {module}." in line)
    return f"{files[path]}\nThis fails: {assertion}\nWrite the right return line."


def mend(text: str, reply: str) -> str:
    """Return a file with the first line of a reply that returns something in place of its own."""
    new = next((line.strip() for line in reply.splitlines() if line.strip().startswith("return ")), None)
    lines = text.splitlines(keepends=True)
    return "".join(f"    {new}\n" if new and line.lstrip().startswith("return ") else line for line in lines)


def ask(messages: list[dict[str, str]]) -> str:
    """Return the reply of the policy."""
    request = Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


if __name__ == "__main__":
    task = json.load(sys.stdin)
    files, path = task["row"]["files"], task["row"]["prompt"].removeprefix("mend ")
    reply = ask([*task["messages"][:-1], {"role": "user", "content": question(files, path)}])
    found, mended = (text.splitlines(keepends=True) for text in (files[path], mend(files[path], reply)))
    print(*unified_diff(found, mended, f"a/{path}", f"b/{path}"), sep="", end="")
