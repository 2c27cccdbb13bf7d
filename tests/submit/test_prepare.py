"""Whether a recipe starts: one answer, whichever command is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from start_models import TINY_CONFIG, write_tiny_model

from hpcrl.cli.main import main
from hpcrl.errors import ConfigError
from hpcrl.submit.prepare import PreparedRun, prepare

Hpcrl = Callable[..., tuple[int, str, str]]
RECIPE = """
name: mine
model: {path: MODEL}
environments: [{name: reverse, kind: words, task: reverse}]
rollouts: {rollouts_per_step: 16, group_size: 8, max_in_flight: 32, max_off_policy_steps: 4}
trainer: {steps: 1}
engine: {max_model_len: 64}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("MODEL", str(write_tiny_model(tmp_path / "model"))))
    return path


@pytest.fixture
def hpcrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hpcrl:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcrl", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def prepared(recipe: Path, *overrides: str, cluster: str = "local") -> PreparedRun:
    return prepare(str(recipe), cluster, overrides, environ={}, cwd=Path.cwd())


def test_a_whole_recipe_starts(recipe: Path) -> None:
    found = prepared(recipe)
    assert (found.starts, found.problems) == (True, ())
    assert found.planned().run.startswith("mine-")


def no_tokenizer(model: Path, _: Path) -> None:
    (model / "tokenizer.json").unlink()


def dangling(model: Path, _: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("gone")


def torn(model: Path, _: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-9])


def other_config(model: Path, _: Path) -> None:
    (model / "config.json").write_text(json.dumps({**TINY_CONFIG, "vocab_size": 99}))


def other_family(model: Path, _: Path) -> None:
    (model / "config.json").write_text(json.dumps({**TINY_CONFIG, "model_type": "seed_oss"}))


def broken_config(model: Path, _: Path) -> None:
    (model / "config.json").write_text("{'model_type': 1}")


def planned_family(model: Path, _: Path) -> None:
    from hpcrl.models import known

    text = (Path(known.__file__).parent / "configs/Mixtral-8x7B-Instruct-v0.1.json").read_text()
    (model / "config.json").write_text(text)


def no_config(model: Path, _: Path) -> None:
    (model / "config.json").unlink()


def no_environment(_: Path, recipe: Path) -> None:
    text = recipe.read_text().replace("kind: words, task: reverse", "kind: custom, factory: 'nowhere:Env'")
    recipe.write_text(text)


def no_torch(_: Path, recipe: Path) -> None:
    python = recipe.with_name("python")
    python.write_text('#!/bin/sh\necho "lacks torch"\nexit 3\n')
    python.chmod(0o755)
    _profile(recipe, f"python_by_role: {{trainer: {python}}}")


def no_python(_: Path, recipe: Path) -> None:
    _profile(recipe, f"python_by_role: {{orchestrator: {recipe.with_name('nowhere')}}}")


def open_secret(_: Path, recipe: Path) -> None:
    recipe.with_name("secret").write_text("x")
    recipe.with_name("secret").chmod(0o644)
    _profile(recipe, f"secrets: {{JUDGE_KEY: {recipe.with_name('secret')}}}")


def vllm_without_vllm(_: Path, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("engine: {", "engine: {backend: vllm, device: cpu, "))
    python = recipe.with_name("python")
    python.write_text('#!/bin/sh\necho "lacks vllm"\nexit 3\n')
    python.chmod(0o755)
    _profile(recipe, f"vllm_python: {python}")


def broken_rule(_: Path, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("group_size: 8", "group_size: 5"))


def _profile(recipe: Path, text: str) -> None:
    recipe.with_name("site.yaml").write_text(f"extends: local\nname: site\n{text}\n")


DAMAGES = (
    *(no_tokenizer, dangling, torn, other_config, other_family, broken_config, planned_family, no_config),
    *(no_environment, no_torch, no_python, open_secret, vllm_without_vllm, broken_rule),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_command_says_what_submit_says(
    recipe: Path, tmp_path: Path, hpcrl: Hpcrl, damage: Callable[[Path, Path], None]
) -> None:
    _profile(recipe, "")
    damage(tmp_path / "model", recipe)
    site = ("-c", str(tmp_path / "site.yaml"))
    code, _, refusal = hpcrl("submit", str(recipe), *site, "--dry-run")
    assert code == 2, refusal
    whats = [line.strip().partition(": ")[2] for line in refusal.splitlines() if line.startswith("  ")]
    assert whats
    code, _, checked = hpcrl("recipe", "check", str(recipe), *site)
    assert (code, checked) == (2, refusal)
    code, out, err = hpcrl("plan", str(recipe), *site)
    assert "starts it" not in out
    if "hpcrl submit says: " not in out:
        # rules end a plan before it is made, in the same words
        assert (code, whats[0] in err) == (2, True), out
    code, out, _ = hpcrl("plan", str(recipe), *site, "--json")
    if out:
        starts = json.loads(out)["forecast"]["starts"]
        assert starts["ok"] is False
        assert all(each["what"] in refusal for each in starts["problems"])


def test_what_starts_is_reported_by_all(recipe: Path, hpcrl: Hpcrl) -> None:
    assert hpcrl("submit", str(recipe), "--dry-run")[0] == 0
    code, out, err = hpcrl("recipe", "check", str(recipe))
    assert (code, "good on local" in out) == (0, True), err
    assert "starts     yes: hpcrl submit starts it" in hpcrl("plan", str(recipe))[1]


def test_a_model_that_the_warm_up_makes_is_not_a_mistake_of_the_recipe(
    recipe: Path, tmp_path: Path, hpcrl: Hpcrl
) -> None:
    text = recipe.read_text().replace(str(tmp_path / "model"), "models/later, warmup: {}")
    recipe.write_text(text.replace("max_model_len: 64", "max_model_len: 256"))
    code, out, err = hpcrl("recipe", "check", str(recipe))
    assert code == 0, err
    assert "its start model does not exist yet" in out
    assert f"hpcrl warmup {recipe}" in err
    assert hpcrl("submit", str(recipe), "--dry-run")[0] == 2
    assert "starts     not yet" in hpcrl("plan", str(recipe))[1]
    # a published model under its name is downloaded, not made
    recipe.write_text(recipe.read_text().replace("models/later", "Qwen/Qwen3-8B"))
    code, _, err = hpcrl("recipe", "check", str(recipe))
    assert code == 2
    assert "hpcrl model get Qwen/Qwen3-8B" in err
    assert "hpcrl warmup" not in err


def test_all_problems_are_reported_at_once(recipe: Path, tmp_path: Path) -> None:
    no_tokenizer(tmp_path / "model", recipe)
    torn(tmp_path / "model", recipe)
    no_environment(tmp_path / "model", recipe)
    with pytest.raises(ConfigError) as refused:
        prepared(recipe).refuse()
    assert len(refused.value.findings) == 3


def test_computing_commands_say_what_submit_would_refuse(recipe: Path, tmp_path: Path, hpcrl: Hpcrl) -> None:
    no_tokenizer(tmp_path / "model", recipe)
    for words in (["plan", "diff", str(recipe), "--set", "seed=2"], ["plan", "search", str(recipe)]):
        _, _, err = hpcrl(*words)
        assert "note: hpcrl submit would refuse" in err
        assert "has no tokenizer.json" in err


def with_keys(recipe: Path) -> None:
    strange = {"attn_logit_softcapping": 50.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attn_factor": 0.5}}
    (recipe.parent / "model/config.json").write_text(json.dumps({**TINY_CONFIG, **strange}))


def test_every_command_names_keys_of_the_model_that_nothing_reads(recipe: Path, hpcrl: Hpcrl) -> None:
    with_keys(recipe)
    named = "neither reads nor knows to be harmless: attn_logit_softcapping, rope_scaling.attn_factor"
    for command in (("recipe", "check"), ("submit", "--dry-run", "-c", "local")):
        code, out, err = hpcrl(*command, str(recipe))
        assert (code, " ".join((out + err).split()).count(named)) == (0, 1), command
    _, out, err = hpcrl("plan", str(recipe), "-c", "local")
    assert " ".join((out + err).split()).count(named) == 1
    _, out, _ = hpcrl("plan", str(recipe), "-c", "local", "--json")
    notes = json.loads(out)["forecast"]["starts"]["notes"]
    assert sum(named in note for note in notes) == 1


def test_keys_are_named_with_what_keeps_it_from_starting(recipe: Path, hpcrl: Hpcrl) -> None:
    with_keys(recipe)
    (recipe.parent / "model/tokenizer.json").unlink()
    for command in (("recipe", "check"), ("plan",)):
        _, out, err = hpcrl(*command, str(recipe))
        assert (out + err).count("attn_logit_softcapping") == 1, command
    assert not prepared(recipe).starts


def test_a_usual_model_has_no_note_of_keys(recipe: Path) -> None:
    assert not [note for note in prepared(recipe).notes if "config.json" in note]


def test_a_chat_format_that_does_not_fit_is_refused_before_the_queue(recipe: Path, hpcrl: Hpcrl) -> None:
    text = recipe.read_text().replace("path: ", "chat: {format: glm-5}, path: ")
    recipe.write_text(text)
    (problem,) = prepared(recipe).problems
    assert (problem.key, problem.where) == ("model.chat.format", "mine.yaml:3")
    assert "glm-5: this model does not have it" in problem.what
    assert "set it to text" in problem.hint
    assert hpcrl("submit", str(recipe), "--dry-run")[0] == 2


def test_a_template_that_cannot_begin_is_refused_before_the_queue(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "model/chat_template.jinja").write_text("{{ raise_exception('not today') }}")
    (problem,) = prepared(recipe).problems
    assert "not today" in problem.what


def test_a_chat_format_that_cannot_be_tried_here_is_reported(recipe: Path, tmp_path: Path) -> None:
    no_python(tmp_path, recipe)
    notes = prepared(recipe, cluster=str(tmp_path / "site.yaml")).notes
    assert any(note.startswith("the chat format of the model was not tried: ") for note in notes)


def test_a_check_of_the_profile_says_what_a_submit_would_say_of_its_secrets(recipe: Path, hpcrl: Hpcrl) -> None:
    open_secret(recipe, recipe)
    site = str(recipe.with_name("site.yaml"))
    (problem,) = prepared(recipe, cluster=site).problems
    code, _, err = hpcrl("cluster", "check", site)
    assert (code, problem.what in err) == (2, True), err
    recipe.with_name("secret").chmod(0o600)
    assert hpcrl("cluster", "check", site)[0] == 0
    assert prepared(recipe, cluster=site).starts
