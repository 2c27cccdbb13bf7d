"""Models whose ``config.json`` is shipped, and the way to facts: by path or by known name."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from hpcrl.models.arch import read_model_config, wrapped_kind
from hpcrl.models.configfile import read_config
from hpcrl.models.facts import ModelFacts
from hpcrl.models.families import facts_from_config

_CONFIG = "config.json"
_CONFIGS = Path(__file__).parent / "configs"


def known_models() -> tuple[str, ...]:
    """Return the names that `load_facts` takes without a path."""
    return tuple(sorted(path.stem for path in _CONFIGS.glob("*.json")))


def load_facts(model: str | Path) -> ModelFacts:
    """Return the facts of a model.

    Parameters
    ----------
    model:
        A model directory or a ``config.json``; or a known name, with or without an owner
        (``GLM-5``, ``zai-org/GLM-5``, ``models/GLM-5``), in any case. A path that exists wins.

    Raises
    ------
    FileNotFoundError
        There is neither such a path nor such a name (the message lists close names).
    ValueError
        The config is of an architecture that is not known, or lacks a size (the message names the file).
    """
    path = find_config(model)
    if path.parent == _CONFIGS:
        return _read(path, path.stem, 0)
    return _read(path, path.parent.name or str(path), path.stat().st_mtime_ns)


def find_config(model: str | Path) -> Path:
    """Return the ``config.json`` for an argument of `load_facts`.

    The argument is a directory with a ``config.json``, such a file, or the name of a known model.

    Raises
    ------
    FileNotFoundError
        It is none of these; the message has the closest names.
    """
    path = Path(model)
    try:
        if path.is_dir() and (path / _CONFIG).is_file():
            path /= _CONFIG
        is_file = path.is_file()
    except OSError as error:
        # a name that no filesystem takes
        raise FileNotFoundError(f"{str(model)[:100]}…: {error.strerror}") from error
    if is_file:
        return path
    names = {name.lower(): name for name in known_models()}
    wanted = Path(model).name.lower()
    # the FP8 upload of a model has the same sizes
    name = names.get(wanted) or names.get(wanted.removesuffix("-fp8"))
    if name is None:
        close = [names[match] for match in get_close_matches(wanted, names, n=3)]
        hint = f"did you mean {' or '.join(close)}?" if close else f"known names: {', '.join(known_models())}"
        raise FileNotFoundError(f"{model}: no config.json there, and no known model of this name; {hint}")
    return _CONFIGS / f"{name}.json"


@lru_cache(maxsize=64)
def _read(path: Path, name: str, _mtime_ns: int) -> ModelFacts:
    try:
        config = read_config(path)
        if path.name == _CONFIG and wrapped_kind(config) is not None:
            # the files in the directory decide whether head and embedding are tied
            config = read_model_config(path.parent)
        return facts_from_config(config, name=name)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
