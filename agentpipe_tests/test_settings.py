"""Settings: what cannot be read is refused by name, and no value of it is told."""

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
