"""A hundred malformed recipes, model configs and sizes: each is a one-screen message or a plan that does not fit.

Every case goes through the command line as a person would give it, in this process. None may end in a traceback, in
silence, or in an exit code that says that all is well.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import hpcrl.models
from hpcrl.cli.main import main

SCREEN = 24
"""Lines of an error that a terminal shows at once."""
RECIPE = """\
name: good
model:
  path: Qwen3-30B-A3B
environments:
  - name: words
    kind: words
trainer:
  steps: 10
"""
CONFIG = json.loads((Path(hpcrl.models.__file__).parent / "configs" / "Qwen3-30B-A3B.json").read_text())
USAGE, DOES_NOT_FIT, UNKNOWN = 2, 3, 4


@dataclass(frozen=True)
class Case:
    """One malformed thing.

    Attributes
    ----------
    says:
        What the message must have.
    recipe, config:
        Contents of the recipe, and of the ``config.json`` of its model.
    config_bytes:
        What the config is filled up to (with zero bytes that take no room).
    options:
        Of ``hpcrl plan``, after the recipe; with ``recipe_name`` in place of the recipe.
    code:
        The exit code.
    """

    says: str
    recipe: str | bytes = RECIPE
    config: str | bytes | None = None
    config_bytes: int = 0
    options: tuple[str, ...] = ()
    recipe_name: str | None = None
    code: int = USAGE
    command: tuple[str, ...] = field(default=("plan",))


def value(text: str) -> str:
    """The recipe with another value of trainer.steps."""
    return RECIPE.replace("steps: 10", f"steps: {text}")


def more(text: str) -> str:
    """The recipe with lines at its end: below ``trainer`` where they are indented."""
    return f"{RECIPE}{text}\n"


def model(**changes: Any) -> str:
    """The config with other values."""
    return json.dumps({**CONFIG, **changes})


def number(text: str) -> str:
    """The config with another spelling of hidden_size, which JSON's writer would not give."""
    return model().replace('"hidden_size": 2048', f'"hidden_size": {text}')


def aliases() -> str:
    """Nine lines that stand for nine to the power of nine values."""
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join([*lines, RECIPE])


def configured(says: str, config: str | bytes, code: int = UNKNOWN) -> Case:
    return Case(says, config=config, code=code)


FILES = {
    "empty file": Case("name: is required", ""),
    "blank lines": Case("name: is required", "\n\n"),
    "only a comment": Case("trainer: is required", "# nothing\n"),
    "null": Case("model: is required", "null\n"),
    "a list": Case("top level must be a mapping", "- a\n"),
    "a word": Case("top level must be a mapping", "hello\n"),
    "not a number": Case("top level must be a mapping", ".nan\n"),
    "UTF-16": Case("cannot be read", RECIPE.encode("utf-16")),
    "UTF-16 without a mark": Case("not valid YAML", RECIPE.encode("utf-16-le")),
    "Latin-1": Case("cannot be read", RECIPE.replace("good", "g\xf6\xf6d").encode("latin-1")),
    "a zero byte": Case("not valid YAML", RECIPE.encode() + b"\0"),
    "a bell": Case("not valid YAML", RECIPE.replace("good", "g\x07d")),
    "a tab before a key": Case("found character '\\t'", RECIPE.replace("  steps", "\tsteps")),
    "five megabytes": Case("bytes", RECIPE + "#" * (5 << 20)),
    "a key twice": Case("appears twice", more("trainer: {steps: 11}")),
    "two documents": Case("another document", more("---\nname: other")),
    "an open bracket": Case("not valid YAML", value("[10")),
    "an alias of nothing": Case("undefined alias", more("description: *nope")),
    "an alias within itself": Case("more than 64 levels deep", more("description: &x [*x]")),
    "a mapping within itself": Case("more than 64 levels deep", more("description: &x {a: *x}")),
    "an alias bomb": Case("aliases stand for more than", aliases()),
    "three thousand brackets": Case("more than 64 levels deep", more("description: " + "[" * 3000 + "]" * 3000)),
    "three thousand braces": Case("more than 64 levels deep", more("description: " + "{a: " * 3000 + "1" + "}" * 3000)),
    "a merge key": Case("not valid YAML", "x: &x {steps: 10}\n" + RECIPE.replace("  steps: 10", "  <<: *x")),
    "a tag that runs code": Case("unknown key", more('x: !!python/object/apply:os.system ["true"]')),
    "an unknown tag": Case("not valid YAML", value("!half 10")),
    "a list as key": Case("keys are text", more("? [a, b]\n: 1")),
    "a mapping as key": Case("keys are text", more("{a: b}: 1")),
    "true as key": Case("keys are text", more("true: 1")),
    "null as key": Case("keys are text", more("~: 1")),
    "an emoji as key": Case("unknown key", more("\N{GRINNING FACE}: 1")),
    "half a character": Case("no file name or text can have", more('description: "\\ud800"')),
    "extends itself": Case("is circular", f"extends: recipe.yaml\n{RECIPE}"),
    "extends a list": Case("path or name of one recipe", f"extends: [a]\n{RECIPE}"),
    "extends a directory": Case("no recipe of this name", f"extends: .\n{RECIPE}"),
    "extends five thousand letters": Case("no recipe of this name", f"extends: {'a' * 5000}\n{RECIPE}"),
}
VALUES = {
    "copies on one rank": Case("does not divide the 1 ranks", more("  parallelism: {dp_replicate: 2}")),
    "a date": Case("trainer.steps: must be a whole number", value("2020-01-01")),
    "a date that is none": Case("is not a valid timestamp", value("2020-13-45")),
    "minutes": Case("must be a whole number, is '1:30'", value("1:30")),
    "a leading zero": Case("must be a whole number, is '010'", value("010")),
    "half a hexadecimal": Case("must be a whole number", value("0x")),
    "binary": Case("not valid YAML", value("!!binary a")),
    "five thousand digits": Case("is not a valid int", value("9" * 5000)),
    "four hundred digits": Case("less than or equal", value("9" * 400)),
    "1e400": Case("must be a whole number, is inf", value("1e400")),
    "infinity": Case("must be a whole number, is inf", value(".inf")),
    "NaN": Case("must be a whole number, is nan", value(".nan")),
    "a fraction": Case("must be a whole number", value("2.5")),
    "negative": Case("greater than 0", value("-1")),
    "yes": Case("must be a whole number, is True", value("yes")),
    "a list for a number": Case("must be a whole number", value("[10]")),
    "a mapping for a number": Case("must be a whole number", value("{a: 1}")),
    "text for a number": Case("without quotes", value("'10'")),
    "NaN for a rate": Case("must be a finite number", more("  optimizer: {learning_rate: .nan}")),
    "1e400 for a rate": Case("must be a finite number", more("  optimizer: {learning_rate: 1e400}")),
    "1e300 GiB": Case("less than or equal", more("engine: {kv_cache_gib: 1e300}")),
    "NaN hours": Case("must be a finite number", more("job: {time_limit_h: .nan}")),
    "a name of three hundred letters": Case("right form", RECIPE.replace("good", "a" * 300)),
    "a name that turns around": Case("right form", RECIPE.replace("good", '"a\\u202eb"')),
    "a name with a slash": Case("right form", RECIPE.replace("good", "../good")),
    "a list for a path": Case("must be text", RECIPE.replace("Qwen3-30B-A3B", "[a]")),
    "a zero byte in a path": Case("no file name or text", RECIPE.replace("Qwen3-30B-A3B", '"a\\0b"')),
    "an empty path": Case("sizes are not known", RECIPE.replace("Qwen3-30B-A3B", '""'), code=UNKNOWN),
    "the root as model": Case("sizes are not known", RECIPE.replace("Qwen3-30B-A3B", "/"), code=UNKNOWN),
    "a device as model": Case("sizes are not known", RECIPE.replace("Qwen3-30B-A3B", "/dev/null"), code=UNKNOWN),
}
SIZES = {
    "a trillion ranks": Case("[ranks-per-node]", more("  ranks: 1000000000000")),
    "minus eight ranks": Case("greater than 0", more("  ranks: -8")),
    "a hundred million nodes": Case(
        "[nodes-available]", more("  nodes: 100000000\n  ranks: 800000000"), code=DOES_NOT_FIT
    ),
    "a quadrillion tokens": Case("DOES NOT FIT", more("  micro_batch_tokens: 1000000000000000"), code=DOES_NOT_FIT),
    "a trillion rollouts": Case(
        "DOES NOT FIT", more("rollouts: {rollouts_per_step: 1000000000000, group_size: 8}"), code=DOES_NOT_FIT
    ),
    "more in flight than exact numbers": Case("less than or equal", more(f"rollouts: {{max_in_flight: {10**20}}}")),
    "contexts of a hundred billion": Case("cannot hold one rollout", more("engine: {max_model_len: 100000000000}")),
    "a billion engines": Case("[port-range]", more("engine: {replicas: 1000000000}")),
    "experts by three of eight": Case("[world-size]", more("  ranks: 8\n  parallelism: {ep: 3}")),
    "heads by three": Case("[replica-size]", more("engine: {backend: vllm, tp: 3}")),
    "more memory than there is": Case("less than or equal", more("engine: {memory: {gpu_memory_utilization: 1.5}}")),
    "no nodes": Case("--nodes", options=("--nodes", "0")),
    "a billion nodes": Case("up to 1,024 nodes", options=("--nodes", "1000000000")),
    "a split of more than the site has": Case("which has 28", options=("--nodes", "29"), code=DOES_NOT_FIT),
    "a range backwards": Case("20..40", command=("plan", "search"), options=("--nodes", "5..2")),
    "a range of letters": Case("20..40", command=("plan", "search"), options=("--nodes", "a..b")),
    "an infinite range": Case("20..40", command=("plan", "search"), options=("--nodes", "inf")),
    "no such calibration": Case("no such file", options=("--calibration", "nowhere.yaml")),
    "no such recipe": Case("no such file", recipe_name="nowhere/recipe.yaml"),
    "a directory as recipe": Case("no such file", recipe_name="./"),
    "five thousand letters": Case("characters", recipe_name="a" * 5000),
    "an override without value": Case("no key or no '='", options=("--set", "trainer.steps")),
    "an override of nothing": Case("list has items", options=("--set", "environments.99.kind=words")),
    "an override into a number": Case("has no parts", options=("--set", "trainer.steps.x=1")),
    "an override within itself": Case("more than 64 levels deep", options=("--set", "trainer.steps=&a [*a]")),
    "an override of brackets": Case("more than 64 levels deep", options=("--set", f"trainer.steps={'[' * 3000}")),
}
CONFIGS = {
    "no config": configured("Expecting value", ""),
    "a list as config": configured("holds a list", "[]"),
    "NaN as size": configured("hidden_size is nan", number("NaN")),
    "1e400 as size": configured("hidden_size is inf", number("1e400")),
    "five thousand digits as size": configured("digits", number("9" * 5000)),
    "a size as fraction": configured("not a whole number", number("2048.0")),
    "a size twice": configured("hidden_size appears twice", model()[:-1] + ', "hidden_size": 4096}'),
    "config in UTF-16": configured("can't decode", model().encode("utf-16")),
    "config in Latin-1": configured("can't decode", model().encode()[:-1] + b', "x": "\xf6"}'),
    "config with a comment": configured("Expecting value", "// sizes\n" + model()),
    "config with a rest": configured("Extra data", model() + "x"),
    "config of brackets": configured("too deep", "[" * 100_000),
    "config of braces": configured("too deep", '{"a":' * 100_000),
    "config of 100 MB": Case("has 104,857,600 bytes", config=model(), config_bytes=100 << 20, code=UNKNOWN),
    "a family as mapping": configured("not text", model(model_type={"a": 1})),
    "an unknown family": configured("known are", model(model_type="qwen9")),
    "no family": configured("model_type is None", model(model_type=None)),
    "all null": configured("model_type is None", json.dumps(dict.fromkeys(CONFIG))),
    "a text config that is none": configured("not an object", model(text_config=3)),
    "no experts": configured("num_experts is 0", model(num_experts=0)),
    "more experts chosen than there are": configured("num_experts_per_tok", model(num_experts_per_tok=129)),
    "heads of no size": configured("head_dim is 0", model(head_dim=0)),
    "weights in AWQ": configured("quant_method 'awq'", model(quantization_config={"quant_method": "awq"})),
    "a norm below zero": configured("rms_norm_eps is -1", model(rms_norm_eps=-1)),
    "groups that do not divide experts": configured("does not divide the 128", model(n_group=7)),
    "an end that is not a token": configured("eos_token_id is 999999", model(eos_token_id=999999)),
    "frequencies of no number": configured("rope_theta is 'much'", model(rope_theta="much")),
    "heads that no group divides": configured("not a multiple", model(num_key_value_heads=7)),
    "as many experts as a file may name": configured(
        "[time-to-move]", model(num_experts=65536, moe_intermediate_size=1 << 24, hidden_size=1 << 20), USAGE
    ),
    "four thousand layers": configured("[time-to-move]", model(num_hidden_layers=4096, layer_types=None), USAGE),
}
ABSENT = {
    "pipeline stages of the trainer": Case("no pipeline parallelism", more("  parallelism: {pp: 4}")),
    "tensor parallelism of the trainer": Case("no tensor parallelism", more("  parallelism: {tp: 8}")),
    "pipeline stages of an engine": Case("no pipeline parallelism", more("engine: {pp: 4}")),
    "pipeline stages by vLLM's flag": Case(
        "no pipeline parallelism", more("engine: {backend: vllm, vllm_args: {pipeline-parallel-size: 2}}")
    ),
    "weights over NCCL": Case("handoff.transport: fabric", more("handoff: {nccl: true}")),
    "transport of weights over NCCL": Case("must be one of 'share' or 'fabric'", more("handoff: {transport: nccl}")),
    "draft tokens": Case("does not support speculative decoding", more("engine: {speculative_config: {method: mtp}}")),
    "GPUs in turns": Case("engine.placement: shared_gpus", more("rollouts: {colocate: true}")),
}
CASES = {**FILES, **VALUES, **SIZES, **CONFIGS, **ABSENT}


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Exit code and what was said, on both streams."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
    monkeypatch.setenv("COLUMNS", "140")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def arguments_of(case: Case, directory: Path) -> list[str]:
    """Write the files of a case and give the command."""
    recipe = directory / "recipe.yaml"
    text = case.recipe
    if case.config is not None:
        own = directory / "model"
        own.mkdir()
        (own / "config.json").write_bytes(case.config.encode() if isinstance(case.config, str) else case.config)
        if case.config_bytes:
            os.truncate(own / "config.json", case.config_bytes)
        assert isinstance(text, str)
        text = text.replace("Qwen3-30B-A3B", str(own))
    recipe.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    return [*case.command, case.recipe_name or str(recipe), "--cluster", "h200-28", *case.options]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_malformed(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(arguments_of(case, tmp_path), monkeypatch)
    said = out + err
    assert code == case.code, said
    assert case.says in " ".join(said.split()), said
    assert "Traceback" not in said
    if err:
        assert max(map(len, err.splitlines())) < 1000
        assert out == ""
        assert len(err.splitlines()) <= SCREEN
    elif code == DOES_NOT_FIT:
        assert said.startswith("DOES NOT FIT")


@pytest.mark.parametrize("case", ABSENT.values(), ids=ABSENT.keys())
def test_recipe_check_refuses_by_name_too(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments_of(case, tmp_path)
    code, _, err = run(["recipe", "check", str(tmp_path / "recipe.yaml")], monkeypatch)
    assert code == USAGE
    assert case.says in " ".join(err.split())


def test_the_list_has_a_hundred() -> None:
    assert len(CASES) >= 100
