"""A copy of a model whose quantised weights are in bfloat16: for engines that keep weights as files have them.

``python -m hpcrl.modeling.checkpoint_io.dequantise DIR --output DIR`` is what ``hpcrl model dequantise`` calls.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from hpcrl.errors import HpcrlError, UsageError, refusal
from hpcrl.modeling.checkpoint_io.load import read_stored
from hpcrl.models.arch import read_model_config
from hpcrl.models.written import small_files, written_config
from hpcrl.reporting.screen_text import visible
from hpcrl.storage.files import StagedDirectory, atomic_write
from hpcrl.weights.format.mxfp4 import MXFP4_DTYPE
from hpcrl.weights.format.quantise import FP8_DTYPE
from hpcrl.weights.read.model_directory import INDEX
from hpcrl.weights.read.model_files import ModelFiles, StoredBlock
from hpcrl.weights.read.stored_weights import quantised_weight

_FILE_BYTES = 5 << 30


def write_dequantised(model_dir: Path, target: Path, *, file_bytes: int = _FILE_BYTES) -> int:
    """Write a copy of ``model_dir`` with quantised weights in bfloat16 and all others as they are.

    Memory: a file's weights, ``file_bytes`` or one weight where that is larger.

    Parameters
    ----------
    target:
        Directory to make; must not exist, and appears at once when complete.
    file_bytes:
        Approximate size of a file in bytes.

    Returns
    -------
    int
        How many weights were quantised.

    Raises
    ------
    UsageError
        ``target`` is there, ``model_dir`` cannot be read, or nothing of it is quantised.
    """
    if target.exists():
        raise UsageError(f"{target} exists already\n    hint: use it as it is, or give another --output")
    path = model_dir / "config.json"
    try:
        config = read_model_config(model_dir)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    stage = StagedDirectory(target, token=f"dequantise-{os.getpid()}")
    with ModelFiles(model_dir) as files:
        weights = {
            name: block for name, block in files.tensors.items() if quantised_weight(name, files.tensors) is None
        }
        quantised = [name for name, block in weights.items() if block.dtype in (FP8_DTYPE, MXFP4_DTYPE)]
        if not quantised:
            raise UsageError(f"no weight of {model_dir} is quantised: use it unchanged")
        stage.create()
        try:
            _write_weights(files, weights, stage.path, file_bytes)
            own = written_config(config, weights, dtype="bfloat16")
            atomic_write(stage.path / "config.json", (json.dumps(own, indent=2) + "\n").encode())
            for small in small_files(model_dir):
                atomic_write(stage.path / small.name, small.read_bytes())
            stage.commit()
        except ValueError as error:
            raise UsageError(f"{model_dir}: {error}") from error
        finally:
            stage.discard()
    return len(quantised)


def _write_weights(files: ModelFiles, weights: Mapping[str, StoredBlock], target: Path, file_bytes: int) -> None:
    portions = list(_portions(weights, file_bytes))
    placed: dict[str, str] = {}
    for number, names in enumerate(portions, start=1):
        file = f"model-{number:05d}-of-{len(portions):05d}.safetensors"
        _save({name: read_stored(files, name) for name in names}, target / file)
        placed |= dict.fromkeys(names, file)
    size = sum(_written_bytes(block) for block in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    atomic_write(target / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _portions(weights: Mapping[str, StoredBlock], file_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, block in sorted(weights.items()):
        own = _written_bytes(block)
        if names and size + own > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    if names:
        yield names


def _written_bytes(block: StoredBlock) -> int:
    return math.prod(block.shape) * (2 if block.dtype in (FP8_DTYPE, MXFP4_DTYPE) else block.width)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the mode of the umask: ``save_file`` makes it readable by its owner only."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode & 0o777
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def main(words: Iterable[str] | None = None) -> int:
    """Run the command line; the list of written files goes to stdout."""
    parser = argparse.ArgumentParser(prog="python -m hpcrl.modeling.checkpoint_io.dequantise", description=__doc__)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    arguments = parser.parse_args(None if words is None else list(words))
    # exit through exceptions, so that a partial output is removed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        count = write_dequantised(arguments.model, arguments.output)
    except (HpcrlError, OSError) as error:
        known = refusal(error) if isinstance(error, OSError) else error
        if known is None:
            raise
        print(visible(f"hpcrl: {known}"), file=sys.stderr)
        return int(known.exit_code)
    print(f"{arguments.output}: {count:,} weights are in bfloat16 now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
