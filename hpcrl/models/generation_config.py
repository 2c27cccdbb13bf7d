"""``generation_config.json`` of a model directory: where answers end, and how text endpoints sample by default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from hpcrl.models.configfile import read_config
from hpcrl.storage.msgspec_types import decode_json

_MOST_BYTES = 1 << 20
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class GenerationConfig(msgspec.Struct, frozen=True):
    """Settings that are read from the file; None stands for a key that is absent or null.

    Bounds are those of transformers (``GenerationConfig.validate``) and of vLLM's sampling parameters.
    """

    eos_token_id: _TokenId | list[_TokenId] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None

    @classmethod
    def read(cls, model_dir: Path) -> GenerationConfig:
        """Read that of a model directory; without the file all keys are absent.

        Raises
        ------
        ValueError
            It is not such a file; the message names it.
        OSError
            The filesystem refused.
        """
        path = model_dir / "generation_config.json"
        if not path.is_file():
            return cls()
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"{path} has {size:,} bytes, {_MOST_BYTES:,} at most")
        try:
            found: GenerationConfig = decode_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        return found

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end an answer; none where the file names none."""
        named = self.eos_token_id
        return () if named is None else (named,) if isinstance(named, int) else tuple(named)


def end_tokens(model_dir: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer, in addition to the tokenizer's own.

    They stand in ``generation_config.json``; where it names none, in ``config.json``, or in the ``text_config`` of it.

    Raises
    ------
    ValueError
        One of the files cannot be read; the message names it.
    """
    if found := GenerationConfig.read(model_dir).eos_token_ids:
        return found
    path = model_dir / "config.json"
    if not path.is_file():
        return ()
    try:
        config = read_config(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    inner = config.get("text_config") if isinstance(config, dict) else None
    for part in (config, inner):
        named = part.get("eos_token_id") if isinstance(part, dict) else None
        ids = named if isinstance(named, list) else [named]
        if all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
            return tuple(ids)
    return ()
