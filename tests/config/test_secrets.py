"""Secrets have no place in recipes and profiles: refused by name, and never shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.load import Loaded, load_cluster, load_recipe
from hpcrl.config.rules.table import check_cluster
from hpcrl.config.secret_values import hide_setting, is_secret_name
from hpcrl.errors import ConfigError
from hpcrl.jobplan import absolute_site_paths, check_secrets, make_plan

VALUE = "hf_0123456789"
PROFILE = "name: site\nkind: local\npaths: {runs_root: runs}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "TOKEN",
        "WANDB_API_KEY",
        "APIKEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "DB_PASSWORD",
        "SSH_PRIVATE_KEY",
        "GOOGLE_CREDENTIAL",
        "X_AUTH",
        "PASSWD",
        "my_secret",
        "openaiApiKey",
        "api-key",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN_PATH",
        "TOKENIZERS_PARALLELISM",
        "TOKENIZER",
        "AUTHOR",
        "SECRETARY",
        "PASSWORD_FILE",
        "AUTH_TYPE",
        "KEY",
        "MONKEY",
        "NCCL_IB_PKEY",
        "OMP_NUM_THREADS",
        "VLLM_CACHE_ROOT",
        "GOOGLE_APPLICATION_CREDENTIALS_FILE",
    ],
)
def test_names_that_only_look_so(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"env: {{OMP_DYNAMIC: '0', HF_TOKEN: {VALUE}}}", "env.HF_TOKEN"),
        (f"env: {{WANDB_API_KEY: [{VALUE}]}}", "env.WANDB_API_KEY"),
        (f"env_by_role: {{engine: {{DB_PASSWORD: {VALUE}}}}}", "env_by_role.engine.DB_PASSWORD"),
    ],
)
def test_a_profile_with_a_secret_is_refused_without_showing_it(line: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"{PROFILE}{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster("./site.yaml")
    (finding, *_) = [f for f in caught.value.findings if f.key == key]
    assert finding.where == "site.yaml:4"
    assert "0600" in finding.hint
    assert "launch.inherit" in finding.hint
    assert VALUE not in str(caught.value)


@pytest.mark.parametrize("command", ["plan", "submit", "recipe show", "recipe check"])
@pytest.mark.parametrize(
    "setting",
    [
        f"environments.0.args.api_key={VALUE}",
        f"engine.vllm_args.hf-token={VALUE}",
        f"engine.vllm_args={{api-key: [{VALUE}]}}",
        f"env.HF_TOKEN={VALUE}",
        f".HF_TOKEN={VALUE}",
        f"environments.9.args.password={VALUE}",
        f"sinks=[{{name: s, sink: 'a.b:C', parameters: {{api_key: {VALUE}}}}}]",
        f"sinks=[{{name: s, sink: mlflow, parameters: {{tracking_uri: 'https://me:{VALUE}@host/x'}}}}]",
        f"notify=[{{name: n, notifier: 'a.b:C', parameters: {{more: {{hosts: ['amqp://me:{VALUE}@host']}}}}}}]",
    ],
)
def test_a_setting_with_a_secret_is_refused_by_every_command(
    command: str, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["hpcrl", *command.split(), "quickstart", "--set", setting])
    with pytest.raises(SystemExit) as exit_info:
        main()
    said = capsys.readouterr()
    assert exit_info.value.code == 2
    assert VALUE not in said.out + said.err
    assert "--set" in said.err
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_harmless_arguments_are_not_refused() -> None:
    load_recipe("quickstart_vllm", ("engine.vllm_args.max-logprobs=7",))
    custom = "{name: e, kind: custom, factory: 'a:b', args: {stop_token: x, max_tokens: 3, auth: none, password: ''}}"
    assert load_recipe("quickstart", (f"environments=[{custom}]",)).value.environments[0].name == "e"
    assert hide_setting("trainer.steps=3") == "trainer.steps=3"
    assert hide_setting(f"a.HF_TOKEN={VALUE}") == "a.HF_TOKEN=..."


def site(tmp_path: Path, file: str) -> Loaded[object]:
    (tmp_path / "site.yaml").write_text(f"{PROFILE}secrets: {{HF_TOKEN: '{file}'}}\n")
    return load_cluster("./site.yaml")


def test_files_of_secrets_are_checked_before_a_run_starts(tmp_path: Path) -> None:
    loaded = site(tmp_path, f"{tmp_path}/token")

    def check() -> None:
        value = absolute_site_paths(loaded.value, tmp_path)  # type: ignore[arg-type]
        plan = make_plan(load_recipe("quickstart").value, value, "r", tmp_path / "r")
        assert plan.groups[0].secrets == {"HF_TOKEN": f"{tmp_path}/token"}
        assert VALUE not in plan.model_dump_json()
        check_secrets(plan, loaded)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="No such file"):
        check()
    (tmp_path / "token").write_text(f"{VALUE}\n")
    (tmp_path / "token").chmod(0o640)
    with pytest.raises(ConfigError, match=r"others may read or write .*token \(mode 640, not 600\)"):
        check()
    (tmp_path / "token").chmod(0o600)
    check()
    (tmp_path / "token").write_text("")
    with pytest.raises(ConfigError, match="no text"):
        check()


def test_a_secret_in_the_place_of_its_file_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secrets\.HF_TOKEN: a value that is not shown does not have") as caught:
        site(tmp_path, VALUE)
    assert VALUE not in str(caught.value)


def test_variables_that_are_ours_are_refused_here_too(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"{PROFILE}secrets: {{HPCRL_RUN_DIR: /x}}\n")
    with pytest.raises(ConfigError, match=r"secrets\.HPCRL_RUN_DIR"):
        check_cluster(load_cluster("./site.yaml"))
