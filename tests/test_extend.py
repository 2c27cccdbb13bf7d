"""Names and paths of extensions, and what is said of those that cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from installed_extensions import install_extensions

from hpcrl.extend import (
    ExtensionError,
    call_extension,
    extension_path,
    import_object,
    installed_extensions,
    load_extension,
)

MODULES = {
    "extend_lab_good": "NUMBER = 1\n\n\ndef made():\n    return 2\n",
    "extend_lab_bad": "def load():\n    raise RuntimeError('no licence \\x1b[2J')\n\n\nload()\n",
    "extend_lab_exits": "import sys\n\nsys.exit('good bye')\n",
}
POINTS = {
    "loss.good": "extend_lab_good:made",
    "loss.also-good": "extend_lab_good:NUMBER [extra]",
    "loss.bad": "extend_lab_bad:load",
    "advantage.good": "extend_lab_good:NUMBER",
    "nonsense": "extend_lab_good:made",
}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = install_extensions(tmp_path / "first", MODULES, POINTS)
    second = install_extensions(tmp_path / "second", {}, {"loss.good": "elsewhere:made"}, "other")
    monkeypatch.syspath_prepend(str(second))
    monkeypatch.syspath_prepend(str(first))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_names_are_those_of_their_kind() -> None:
    assert installed_extensions("loss") == {
        "also-good": "extend_lab_good:NUMBER",
        "bad": "extend_lab_bad:load",
        "good": "extend_lab_good:made",
    }
    assert installed_extensions("advantage") == {"good": "extend_lab_good:NUMBER"}
    assert installed_extensions("sink") == {}
    assert not {"extend_lab_good", "extend_lab_bad"} & set(sys.modules)


def test_a_path_or_a_name() -> None:
    assert extension_path("sink", "any.module:Thing") == "any.module:Thing"
    assert extension_path("loss", "good") == "extend_lab_good:made"
    assert load_extension("loss", "good")() == 2
    assert load_extension("advantage", "good") == 1


@pytest.mark.parametrize(
    ("kind", "name", "said", "hint"),
    [
        ("loss", "goods", "no installed package registers loss.goods", "did you mean 'good'?"),
        ("loss", "zzz", "no installed package registers loss.zzz", "installed are also-good, bad, good"),
        ("sink", "csv", "no installed package registers sink.csv", "install its package, or name package.module:Name"),
        (
            "loss",
            "nowhere.at.all:X",
            "module 'nowhere.at.all' cannot be imported: No module named 'nowhere'",
            "PYTHONPATH",
        ),
        ("loss", "extend_lab_good:make", "'extend_lab_good' has no object 'make'", "it has made"),
        (
            "loss",
            "bad",
            "module 'extend_lab_bad' cannot be imported: RuntimeError: no licence \\x1b[2J",
            "correct the module",
        ),
        (
            "loss",
            "extend_lab_exits:x",
            "module 'extend_lab_exits' cannot be imported: SystemExit: good bye",
            "correct the module",
        ),
    ],
)
def test_what_cannot_be_loaded_is_reported(kind, name: str, said: str, hint: str) -> None:
    with pytest.raises(ExtensionError) as caught:
        load_extension(kind, name)
    assert said in caught.value.what
    assert hint in caught.value.hint
    assert str(caught.value) == f"{caught.value.what}\n    hint: {caught.value.hint}"


def test_frames_are_those_of_the_extension(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError) as caught:
        load_extension("loss", "bad")
    _, *frames = caught.value.what.splitlines()
    path = tmp_path / "first/extend_lab_bad.py"
    assert [frame.strip() for frame in frames] == [
        f"{path}:5 in <module>: load()",
        f"{path}:2 in load: raise RuntimeError('no licence \\x1b[2J')",
    ]


def test_what_must_be_called_is_callable() -> None:
    assert import_object("extend_lab_good:NUMBER") == 1
    with pytest.raises(ExtensionError, match="'extend_lab_good' has no function 'NUMBER'"):
        import_object("extend_lab_good:NUMBER", called="function")


def test_foreign_exceptions_become_ours() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError("not even this")

    def raises() -> None:
        raise Odd

    with pytest.raises(ExtensionError, match="lab:raises raised Odd: \\(its message cannot be shown: ValueError\\)"):
        call_extension("lab:raises", raises, "mend it")
    assert call_extension("lab:fine", lambda: 3, "mend it") == 3
