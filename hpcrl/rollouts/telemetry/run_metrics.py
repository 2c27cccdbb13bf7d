"""``/metrics/run`` of the orchestrator: the Prometheus text of all parts of a run that have one, as one text.

Each sample gets the labels ``role`` and ``replica``, and ``rank`` where a replica has several servers. A part that does
not answer is missing, and says so by ``hpcrl_part_up`` 0; so does each server of a replica for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

_TIMEOUT_S = 3.0
_MAX_BYTES = 16 << 20
"""Maximum size of the text of one part."""
_METRICS_PORTS = {"router": 1, "store": 2}
"""Offset of a role's metrics port from its first port (`hpcrl.planning`)."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?(\s+\S.*)$")
_SUFFIXES = frozenset({"_total", "_bucket", "_sum", "_count", "_created", "_info"})


class MetricsPart(NamedTuple):
    """Part of the run that has metrics.

    Attributes
    ----------
    url:
        URL of its Prometheus text.
    rank:
        Number of the server in its replica; None where that has one server.
    """

    role: str
    replica: int
    url: str
    rank: int | None = None


async def read_run(
    http: aiohttp.ClientSession, urls: Mapping[str, Sequence[str]], engines: Mapping[str, Sequence[str]], *, own: str
) -> str:
    """Ask all parts at once, and merge the answers of a few seconds.

    Parameters
    ----------
    http:
        Brings the run's token along.
    urls:
        Endpoints of the attempt, by role.
    engines:
        URLs of the servers of each, by name (``<role>-<replica>``); they come and go.
    own:
        Text of the orchestrator.
    """
    parts = [part for name, servers in engines.items() for part in _parts(name, servers)]
    if "router" in urls:
        parts.append(MetricsPart("router", 0, _above(urls["router"][0], _METRICS_PORTS["router"])))
    asked = [read_text(http, part.url) for part in parts]
    async with contextlib.AsyncExitStack() as stack:
        if "store" in urls:
            parts.append(MetricsPart("store", 0, _above(urls["store"][0], _METRICS_PORTS["store"])))
            # the pool's master does not authenticate clients: it must not get the run's token
            bare = await stack.enter_async_context(aiohttp.ClientSession())
            asked.append(read_text(bare, parts[-1].url))
        texts = await asyncio.gather(*asked)
    return merge_metrics([(MetricsPart("orchestrator", 0, ""), own), *zip(parts, texts, strict=True)])


def _parts(name: str, servers: Sequence[str]) -> list[MetricsPart]:
    role, _, replica = name.rpartition("-")
    several = len(servers) > 1
    return [
        MetricsPart(role, int(replica), f"{url}/metrics", rank if several else None) for rank, url in enumerate(servers)
    ]


def _above(url: str, ports: int) -> str:
    address = urlsplit(url)
    return f"http://{address.hostname}:{(address.port or 0) + ports}/metrics"


async def read_text(http: aiohttp.ClientSession, url: str) -> str | None:
    """Return a Prometheus text; None where the server gives none within three seconds, or it is too long."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), allow_redirects=False) as answer:
            if answer.status != 200:
                return None
            text = bytearray()
            async for piece in answer.content.iter_any():
                text += piece
                if len(text) > _MAX_BYTES:
                    return None
            return text.decode()
    except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
        return None


def merge_metrics(texts: Sequence[tuple[MetricsPart, str | None]]) -> str:
    """Return one text made of many, in which the samples of a metric are adjacent, as the format requires."""
    heads: dict[str, list[str]] = {
        "hpcrl_part_up": ["# HELP hpcrl_part_up Whether the part answered.", "# TYPE hpcrl_part_up gauge"]
    }
    samples: dict[str, list[str]] = {"hpcrl_part_up": []}
    for part, text in texts:
        own = f'role="{part.role}",replica="{part.replica}"'
        own += "" if part.rank is None else f',rank="{part.rank}"'
        samples["hpcrl_part_up"].append(f"hpcrl_part_up{{{own}}} {int(text is not None)}")
        family = ""
        said: set[str] = set()
        for line in (text or "").splitlines():
            if line.startswith(("# TYPE ", "# HELP ")):
                family = line.split(" ", 3)[2]
                if family not in heads or family in said:
                    heads.setdefault(family, []).append(line)
                    said.add(family)
            elif match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                # samples of a metric family have its name, or its name and a suffix
                mine = family if name == family or name.removeprefix(family) in _SUFFIXES else name
                all_labels = ",".join(filter(None, (own, labels)))
                samples.setdefault(mine, []).append(f"{name}{{{all_labels}}}{value}")
    return "\n".join(line for name, lines in samples.items() for line in (*heads.get(name, ()), *lines)) + "\n"
