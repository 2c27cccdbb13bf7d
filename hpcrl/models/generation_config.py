"""``generation_config.json`` of a model directory: where answers end, and how text endpoints sample by default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from hpcrl.decoding import decode_json

__all__ = ["GenerationConfig"]

_MOST_BYTES = 1 << 20
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class GenerationConfig(msgspec.Struct, frozen=True):
    """What is read of the file; None stands for a key that is absent or null.

    Bounds are those of transformers (``GenerationConfig.validate``) and of vLLM's sampling parameters.
    """

    eos_token_id: _TokenId | list[_TokenId] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None

    @classmethod
    def read(cls, model_dir: Path) -> GenerationConfig:
        """Read that of a model directory; without the file no key is there.

        Raises
        ------
        ValueError
            It is no such file; the message names it.
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
        """Tokens that end an answer; none where the file names none."""
        named = self.eos_token_id
        return () if named is None else (named,) if isinstance(named, int) else tuple(named)
