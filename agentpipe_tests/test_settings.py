"""Settings: what cannot be read is refused by name, and no value of it is told."""

import json
import traceback

import pytest

from agentpipe.errors import SettingsError
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.options import training_options
from agentpipe.settings import load_settings


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("AGENTPIPE_ALERTS__WEBHOK", "geheim", "setting alerts.webhok: Extra inputs are not permitted"),
        ("AGENTPIPE_ALERTS__WEBHOOK__URL", "geheim", "setting alerts.webhook: Input should be a valid string"),
        ("AGENTPIPE_ALERTS", '{"webhook": ["geheim"]}', "setting alerts.webhook: Input should be a valid string"),
        ("AGENTPIPE_ALERTS", "geheim", "malformed setting: .*alerts"),
    ],
)
def test_a_secret_under_a_wrong_name_is_not_told(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=text) as caught:
        load_settings()
    assert "geheim" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "value", ["triton", "triton:", ":8001", "http://triton:8001", "a b:1", "triton:0", "t:70000", ""]
)
def test_an_address_of_a_triton_that_is_none_is_refused_at_the_start(monkeypatch, value):
    monkeypatch.setenv("AGENTPIPE_AGENT__TRITON", json.dumps(["good:8001", value]))
    with pytest.raises(SettingsError, match="is no address; one is triton:8001"):
        load_settings()


def test_addresses_of_tritons_are_host_and_port(monkeypatch):
    monkeypatch.setenv("AGENTPIPE_AGENT__TRITON", '["triton:8001", "127.0.0.1:9", "[::1]:65535"]')
    assert load_settings().agent.triton == ("triton:8001", "127.0.0.1:9", "[::1]:65535")


def test_demonstrations_count_by_their_content_and_not_by_their_place(monkeypatch, tmp_path):
    plain = load_settings().digest()
    digests = []
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"other")):
        (tmp_path / name).write_bytes(content)
        monkeypatch.setenv("AGENTPIPE_TRAINING__DEMONSTRATIONS", str(tmp_path / name))
        digests.append(load_settings().digest())
    assert digests[0] == digests[1]
    assert len({plain, *digests}) == 3


def test_a_shard_of_demonstrations_counts_by_its_manifest(monkeypatch, tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setenv("AGENTPIPE_TRAINING__DEMONSTRATIONS", str(tmp_path))
    before = load_settings().digest()
    (tmp_path / "manifest.json").write_text('{"digest": "other"}')
    assert load_settings().digest() != before


def test_demonstrations_that_are_not_there_are_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTPIPE_TRAINING__DEMONSTRATIONS", str(tmp_path / "nowhere.parquet"))
    with pytest.raises(SettingsError, match=r"nowhere\.parquet cannot be read") as caught:
        load_settings().digest()
    assert caught.value.where["field"] == "training.demonstrations"


def test_a_machine_history_that_is_not_there_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTPIPE_MACHINE_HISTORY", str(tmp_path / "nowhere.csv"))
    with pytest.raises(SettingsError, match=r"nowhere\.csv cannot be read") as caught:
        load_settings().digest()
    assert caught.value.where["field"] == "machine_history"


def test_aids_of_the_settings_are_those_of_the_training(monkeypatch):
    monkeypatch.setenv("AGENTPIPE_AIDS__DISTILLATION", "always")
    monkeypatch.setenv("AGENTPIPE_AIDS__HARDEST", "70")
    aids = training_options(load_settings()).aids
    assert (aids.distillation, aids.hardest, aids.curiosity_weight) == ("always", 70, 0.02)


def test_defaults_of_the_aids_are_the_same_in_settings_and_options(monkeypatch):
    assert training_options(load_settings()).aids == AidOptions()
