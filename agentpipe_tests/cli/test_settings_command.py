"""``agentpipe settings``: the list of all settings."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.settings import Settings

SECRET = "geheim"
runner = CliRunner()


def call(*arguments):
    result = runner.invoke(app, ["settings", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def listed(*arguments):
    """The listed settings by their dotted names."""
    code, content = call(*arguments)
    assert code == 0, content
    return {setting["name"]: setting for setting in content["settings"]}


def fields(model, prefix=""):
    """Dotted name and default of every field, sections entered."""
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from fields(type(field.default), f"{name}.")
        else:
            yield f"{prefix}{name}", field


def values(content):
    """Dotted name and value in a dump of the settings."""
    return {
        f"{section}.{name}" if isinstance(part, dict) else section: value
        for section, part in content.items()
        for name, value in (part.items() if isinstance(part, dict) else [("", part)])
    }


def test_every_field_of_the_model_is_listed_once_with_a_description():
    names = [setting["name"] for setting in call()[1]["settings"]]
    assert sorted(names) == sorted(name for name, _ in fields(Settings))
    assert len(set(names)) == len(names)
    assert [name for name, setting in listed().items() if not setting["description"].strip()] == []
    assert [name for name, field in fields(Settings) if not field.description] == []


def test_the_text_names_every_variable_once():
    lines = runner.invoke(app, ["settings"]).stdout.splitlines()
    for setting in listed().values():
        assert sum(line.split()[:1] == [setting["variable"]] for line in lines) == 1, setting["name"]


def test_the_json_holds_the_defaults_of_the_model():
    assert {name: setting["value"] for name, setting in listed().items()} == values(Settings().model_dump(mode="json"))
    assert {setting["source"] for setting in listed().values()} == {"default"}


def test_the_listed_variables_set_the_settings(monkeypatch):
    numbers = {name for name, field in fields(Settings) if field.annotation in (int, float)}
    plain = {name: setting for name, setting in listed().items() if name in numbers}
    values = {name: setting["default"] or 1 for name, setting in plain.items()}  # in range whatever the setting
    for name, setting in plain.items():
        monkeypatch.setenv(setting["variable"], str(values[name]))
    found = listed()
    assert {name: found[name]["value"] for name in numbers} == values
    assert {name for name, setting in found.items() if setting["source"] == "environment"} == numbers


def test_what_the_environment_sets_is_marked_and_nothing_else(monkeypatch):
    monkeypatch.setenv("AGENTPIPE_GATES__SUCCESS_MIN", "0.6")
    text = runner.invoke(app, ["settings", "gates"]).stdout
    marked = [line for line in text.splitlines() if line.startswith("*")]
    assert marked == ["* AGENTPIPE_GATES__SUCCESS_MIN  0.6  (set by the environment; default 0.75)"]
    assert [name for name, setting in listed().items() if setting["source"] != "default"] == ["gates.success_min"]


def test_a_variable_of_a_whole_section_marks_what_it_sets(monkeypatch):
    monkeypatch.setenv("AGENTPIPE_SCHEDULE", '{"hour": 3}')
    assert [name for name, setting in listed().items() if setting["source"] == "environment"] == ["schedule.hour"]


def test_an_empty_variable_sets_nothing(monkeypatch):
    monkeypatch.setenv("AGENTPIPE_GATES__SUCCESS_MIN", "")
    assert listed()["gates.success_min"]["source"] == "default"


@pytest.mark.parametrize("how", ["option", "environment"])
def test_sizes_of_the_profile_are_told_from_what_the_environment_sets(monkeypatch, how):
    monkeypatch.setenv("AGENTPIPE_TRAINING__EPOCHS", "3")
    if how == "environment":
        monkeypatch.setenv("AGENTPIPE_PROFILE", "demo")
    found = listed(*(["--profile", "demo"] if how == "option" else []))
    assert found["profile"]["value"] == "demo"
    assert found["profile"]["source"] == ("environment" if how == "environment" else "profile")
    assert (found["training.total_steps"]["value"], found["training.total_steps"]["source"]) == (400_000, "profile")
    assert (found["training.epochs"]["value"], found["training.epochs"]["source"]) == (3, "environment")
    assert found["training.gamma"]["source"] == "default"


@pytest.mark.parametrize(
    ("variable", "name", "value"),
    [
        ("REDIS_URL", "redis_url", f"redis://:{SECRET}@127.0.0.1:6379/0"),
        ("AGENTPIPE_REDIS_URL", "redis_url", f"redis://:{SECRET}@127.0.0.1:6379/0"),
        ("AGENTPIPE_ALERTS__WEBHOOK", "alerts.webhook", f"https://hooks.example.com/{SECRET}"),
        ("AGENTPIPE_ALERTS", "alerts.webhook", f'{{"webhook": "https://hooks.example.com/{SECRET}"}}'),
        ("AGENTPIPE_TRITON_URL", "triton_url", f"http://ann:{SECRET}@127.0.0.1:8000"),
        ("AGENTPIPE_ALERTS__UI", "alerts.ui", f"http://ann:a/{SECRET}@127.0.0.1:3000"),
    ],
)
def test_a_secret_is_shown_as_set_and_never_printed(monkeypatch, variable, name, value):
    monkeypatch.setenv(variable, value)
    for arguments in ([], ["--json"], [name], ["--profile", "demo"]):
        result = runner.invoke(app, ["settings", *arguments])
        assert result.exit_code == 0
        assert SECRET not in result.output
    assert listed()[name]["source"] == "environment"
    assert "***" in listed()[name]["value"]


@pytest.mark.parametrize("part", ["gates.success", "GATES__SUCCESS", "agentpipe_gates__success"])
def test_a_part_of_a_name_narrows_the_list(part):
    names = ["gates.success_min", "gates.success_target", "gates.success_stall", "gates.success_stall_width"]
    assert list(listed(part)) == names


def test_a_name_that_no_setting_has_is_an_error():
    code, content = call("succes_min")
    assert code == 1
    assert content["error"]["type"] == "SettingsError"
    assert "succes_min" in content["error"]["message"]


def test_a_value_out_of_range_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("AGENTPIPE_GATES__SUCCESS_MIN", "7")
    code, content = call()
    assert code == 1
    assert content["error"]["where"] == {"field": "gates.success_min"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("profile", "demo or standard"),
        ("gates.success_min", "number, 0 to 1"),
        ("gates.beats_random_only", "true or false"),
        ("training.learning_rate", "number, above 0 and below 1"),
        ("training.environments", "whole number, above 0, or none"),
        ("aids.curiosity", "off, remedy or always"),
        ("agent.triton", "JSON list of texts"),
        ("table_source", "path, or none"),
        ("alerts.webhook", "secret text, or none"),
        ("feedback.stream", "text"),
    ],
)
def test_type_and_range_are_told_in_words(name, words):
    assert listed()[name]["type"] == words
