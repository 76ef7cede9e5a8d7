"""Settings: what cannot be read is refused by name, and no value of it is told."""

import json
import traceback

import pytest

from agentpipe.errors import SettingsError
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
