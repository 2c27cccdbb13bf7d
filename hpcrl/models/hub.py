"""Paths of models that mean a published model: a warm-up does not make a model that is downloaded."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from hpcrl.models.known import known_models

_OWNERS = {
    "deepseek": "deepseek-ai",
    "glm": "zai-org",
    "gpt-oss": "openai",
    "kimi": "moonshotai",
    "llama": "meta-llama",
    "minimax": "MiniMaxAI",
    "mistral": "mistralai",
    "mixtral": "mistralai",
    "nvidia": "nvidia",
    "qwen": "Qwen",
    "smollm": "HuggingFaceTB",
}
"""Publishers of models by the beginning of their names."""
_OTHER_OWNERS = ("google", "microsoft", "ibm-granite", "allenai", "bytedance-seed", "huggingfacetb", "xiaomimimo")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*")
"""A branch, tag or commit: without slashes, as it is part of the name of a directory."""
_PLACES = ("models", "model", "checkpoints", "ckpts", "weights", "runs", "outputs", "output", "data", "tmp")
"""First parts of paths that are directories of one's own, whether or not they exist yet."""


class HubId(NamedTuple):
    """A published model: ``OWNER/NAME``, and a branch, tag or commit of it (None: its main branch)."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def parse_hub_id(text: str) -> HubId | None:
    """Read ``OWNER/NAME`` or ``OWNER/NAME@REVISION``; None where it is neither."""
    name, _, revision = text.partition("@")
    if not _HUB_ID.fullmatch(name) or ("@" in text and not _REVISION.fullmatch(revision)):
        return None
    return HubId(name, revision or None)


def published_id(path: str) -> str | None:
    """Return the id on the Hugging Face hub that a path of a model means; None where it means none.

    It is one of three: the name of a known model behind any directory (``/shared/models/Qwen3-8B``), a name behind an
    owner that publishes models (``/shared/meta-llama/X``), or ``owner/name`` where no directory is called like the
    owner.
    """
    if "@" in path:
        found = parse_hub_id(path)
        return None if found is None or published_id(found.name) != found.name else str(found)
    parts = Path(path).parts
    if not parts:
        return None
    owner, name = parts[-2] if len(parts) > 1 else "", parts[-1]
    publishers = {each.lower() for each in (*_OWNERS.values(), *_OTHER_OWNERS)}
    if owner.lower() in publishers and _HUB_ID.fullmatch(f"{owner}/{name}"):
        return f"{owner}/{name}"
    known = {each.lower(): each for each in known_models()}.get(name.lower())
    if known is not None:
        publisher = next(who for begin, who in _OWNERS.items() if known.lower().startswith(begin))
        return f"{publisher}/{known}"
    own = owner.lower() in _PLACES or Path(owner).is_dir()
    return None if own or not _HUB_ID.fullmatch(path) else path


def download_command(model_id: str, directory: str | None = None, *, cluster: str | None = None) -> str:
    """Return the command that downloads a published model.

    Parameters
    ----------
    directory:
        Target directory; None: the directory of models of a site.
    cluster:
        The profile of that site; None: the one that commands take by default.
    """
    words = ["hpcrl", "model", "get", model_id]
    if directory is not None:
        words += ["--output", directory]
    elif cluster is not None:
        words += ["--cluster", cluster]
    return shlex.join(words)
