"""A run of an earlier version of hpcrl: how it is packed into a small archive, and unpacked for a test.

To make another archive, check out the earlier version, make a tiny run with it, and pack it from here::

    hpcrl warmup quickstart --output model --set model.warmup.steps=20 --set model.warmup.num_experts=2 \\
        --set model.warmup.num_hidden_layers=1 --set model.warmup.hidden_size=8 \\
        --set model.warmup.moe_intermediate_size=8 --set model.warmup.num_attention_heads=2 \\
        --set model.warmup.num_key_value_heads=1 --set model.warmup.head_dim=4
    hpcrl submit quickstart --name earlier --set model.path=model ...   # then `hpcrl cancel earlier` after a few steps
    python tests/e2e/earlier_run.py DIRECTORY tests/e2e/earlier/NAME.tar.xz

``DIRECTORY`` has ``model/`` and ``runs/earlier/``. Paths and the name of the machine become marks in the archive.
"""

from __future__ import annotations

import io
import json
import re
import socket
import sys
import tarfile
from pathlib import Path

#: replaced in the archive, and filled in where it is unpacked
ROOT_MARK, HOST_MARK = "@ROOT@", "@HOST@"
#: reserved disk space, and files of submitit, which the job alone reads
LEFT_OUT = (".reserve-", "submitit/")
TEXTS = (".json", ".jsonl", ".yaml", ".log")


def unpack(archive: Path, directory: Path) -> Path:
    """Write what an archive has into a directory, as if the run had been made there; returns the run."""
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    for path in directory.rglob("*"):
        if path.is_file() and path.suffix in TEXTS:
            text = path.read_text()
            path.write_text(text.replace(ROOT_MARK, str(directory)).replace(HOST_MARK, socket.gethostname()))
    (run,) = (directory / "runs").iterdir()
    return run


def pack(directory: Path, archive: Path) -> None:
    """Write an archive of ``model/`` and ``runs/`` of a directory."""
    (record,) = directory.glob("runs/*/run.json")
    host, code = json.loads(record.read_text())["host"], code_places(record)
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(directory.rglob("*")):
            name = str(path.relative_to(directory))
            if name.partition("/")[0] not in ("model", "runs") or any(part in name for part in LEFT_OUT):
                continue
            info = tar.gettarinfo(path, name)
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            if not path.is_file() or path.is_symlink():
                tar.addfile(info)
                continue
            data = path.read_bytes()
            if path.suffix in TEXTS:
                text = data.decode().replace(str(directory), ROOT_MARK)
                for place in code:
                    text = text.replace(place, f"{ROOT_MARK}/code")
                data = re.sub(rf'(?<=["\s]){re.escape(host)}(?=["\s)])', HOST_MARK, text).encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def code_places(record: Path) -> list[str]:
    """Directories of the earlier version and of its environments, the longest first."""
    places = set[str]()
    for path in record.parent.glob("snapshots/*/snapshot.json"):
        snapshot = json.loads(path.read_text())
        places |= {str(Path(snapshot["hpcrl_path"]).parent), *(str(Path(p).parents[1]) for p in snapshot["packages"])}
    return sorted(places, key=len, reverse=True)


if __name__ == "__main__":
    pack(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
