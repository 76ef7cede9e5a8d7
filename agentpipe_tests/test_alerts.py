"""Alerts against a real receiver on the loopback address: cut to Slack's limits, bounded, never telling the URL."""

import contextlib
import email.utils
import http.server
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from agentpipe import alerts
from agentpipe.alerts import Alert, Sent, send, to_slack
from agentpipe.errors import AlertError
from agentpipe_tests.redis_server import free_port

SECRET = "T000-geheim"
ALERT = Alert(
    "Gate 5 failed", "success 0.71 < 0.75", {"partition": "2026-11-29|nightly"}, "http://localhost:3000/runs/1"
)


class Receiver:
    """Gives the answers of a list, one a request, then 200; keeps what it got."""

    def __init__(self):
        self.answers, self.got, self.paths = [], [], []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append(json.loads(body))
                receiver.paths.append(self.path)
                status, headers, text, delay = receiver.answers.pop(0) if receiver.answers else (200, {}, b"ok", 0)
                threading.Event().wait(delay)
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{SECRET}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


def answer(status, headers=None, text=b"", delay=0.0):
    return status, headers or {}, text, delay


@pytest.mark.parametrize("secret", [str, SecretStr])
def test_an_alert_arrives_as_slack_takes_it(receiver, secret):
    assert send(secret(receiver.url), ALERT) == Sent(True, 1, 200, "")
    assert receiver.paths == [f"/services/{SECRET}"]
    assert receiver.got == [
        {
            "text": "Gate 5 failed: success 0.71 &lt; 0.75",
            "blocks": [
                {"type": "header", "text": {"type": "plain_text", "text": "Gate 5 failed"}},
                {"type": "section", "text": {"type": "mrkdwn", "text": "success 0.71 &lt; 0.75"}},
                {"type": "section", "fields": [{"type": "mrkdwn", "text": "*partition*\n2026-11-29|nightly"}]},
                {"type": "section", "text": {"type": "mrkdwn", "text": "<http://localhost:3000/runs/1|Open>"}},
            ],
        }
    ]


@pytest.mark.parametrize(
    "failing",
    [answer(500), answer(503), answer(429, {"Retry-After": "0"}), answer(429, {"Retry-After": "never"}), answer(429)],
)
def test_what_may_pass_is_tried_again(receiver, failing):
    receiver.answers = [failing, failing]
    assert send(receiver.url, ALERT, pause=0.001) == Sent(True, 3, 200, "")
    assert len(receiver.got) == 3
    receiver.answers = [failing] * 9
    assert send(receiver.url, ALERT, pause=0.001) == Sent(False, 3, failing[0], f"the receiver answered {failing[0]}")
    assert len(receiver.got) == 6


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        (answer(400, text=b"invalid_blocks"), "the receiver answered 400 (invalid_blocks)"),
        (answer(404, text=b"no_service"), "the receiver answered 404 (no_service)"),
        (answer(403, text=f"no /services/{SECRET} here".encode()), "the receiver answered 403"),
        (answer(410), "the receiver answered 410"),
        (answer(302, {"Location": "http://127.0.0.1:1/"}), "the receiver answered 302"),
        (answer(307, {"Location": "http://127.0.0.1:1/"}), "the receiver answered 307"),
    ],
)
def test_what_will_not_pass_is_tried_once(receiver, failing, reason):
    receiver.answers = [failing]
    assert send(receiver.url, ALERT) == Sent(False, 1, failing[0], reason)
    assert len(receiver.got) == 1


def test_a_slow_receiver_is_given_up_in_time(receiver):
    receiver.answers = [answer(200, delay=2.0)]
    assert send(receiver.url, ALERT, 0.05, attempts=1) == Sent(False, 1, None, "no answer within 0.05 s")
    receiver.answers = [answer(200, delay=2.0)]
    assert send(receiver.url, ALERT, 0.5, pause=0.001).delivered


def test_an_answer_byte_by_byte_is_given_up_in_time():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        over = threading.Event()

        def drip():
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                while not over.wait(0.02):
                    client.sendall(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        sent = send(f"http://127.0.0.1:{listener.getsockname()[1]}/", ALERT, 0.2, attempts=1)
        over.set()
        thread.join()
    assert sent == Sent(False, 1, None, "no answer within 0.2 s")


def test_a_receiver_that_asks_for_patience_gets_it_within_bounds(receiver, monkeypatch):
    pauses = []
    monkeypatch.setattr(alerts.time, "sleep", pauses.append)
    receiver.answers = [answer(429, {"Retry-After": "7"}), answer(500)]
    assert send(receiver.url, ALERT, pause=0.5) == Sent(True, 3, 200, "")
    assert pauses == [7.0, 1.0]
    receiver.answers = [answer(429, {"Retry-After": "3600"})]
    assert send(receiver.url, ALERT) == Sent(False, 1, 429, "the receiver answered 429")
    past = email.utils.formatdate(time.time() - 60, usegmt=True)
    future = email.utils.formatdate(time.time() + 3_600, usegmt=True)
    receiver.answers = [answer(503, {"Retry-After": past}), answer(503, {"Retry-After": future})]
    assert send(receiver.url, ALERT) == Sent(False, 2, 503, "the receiver answered 503")
    assert pauses == [7.0, 1.0, 0.0]


def test_a_refused_connection_is_said():
    sent = send(f"http://127.0.0.1:{free_port()}/{SECRET}", ALERT, pause=0.001)
    assert sent == Sent(False, 3, None, "the receiver cannot be reached: Connection refused")


def test_a_name_that_does_not_exist_is_said():
    sent = send(f"http://agentpipe-receiver.invalid/{SECRET}", ALERT, attempts=1)
    assert not sent.delivered
    assert sent.reason.startswith(("the receiver cannot be reached: ", "no answer within"))


def test_no_encryption_where_it_is_expected_is_said(receiver):
    sent = send(receiver.url.replace("http:", "https:"), ALERT)
    assert sent == Sent(False, 1, None, "no trusted encrypted connection to the receiver")


@pytest.mark.parametrize(
    "url",
    [
        *("", "hooks.example", f"ftp://host/{SECRET}", f"file:///{SECRET}", f"http://host:{SECRET}/"),
        *(f"http://[{SECRET}/", f"http://u:{SECRET}@host/", f"http://host/{SECRET} x\n", f"http://{'ö' * 80}/{SECRET}"),
    ],
)
def test_what_is_no_web_address_is_said_and_not_told(url):
    sent = send(url, ALERT)
    assert sent == Sent(False, 1, None, "the webhook is not a web address")
    with pytest.raises(AlertError) as caught:
        send(url, ALERT, raising=True)
    assert SECRET not in repr(caught.value)


def test_without_a_webhook_nothing_is_tried_and_the_reason_says_so(monkeypatch, capfd):
    monkeypatch.setattr(alerts, "_attempt", lambda *_: pytest.fail("an attempt was made"))
    assert send(None, ALERT) == Sent(False, 0, None, "no webhook is set")
    with pytest.raises(AlertError, match="was not delivered: no webhook is set"):
        send(None, ALERT, raising=True)
    assert capfd.readouterr().err == ""


def test_failing_raises_only_where_asked_and_never_tells_the_url(receiver, capfd):
    receiver.answers = [answer(500, text=receiver.url.encode())] * 3
    with pytest.raises(AlertError, match="was not delivered: the receiver answered 500") as caught:
        send(SecretStr(receiver.url), ALERT, pause=0.001, raising=True)
    shown = repr(caught.value) + repr(caught.value.__cause__) + repr(caught.value.__context__)
    assert SECRET not in shown + "".join(capfd.readouterr())


# ----------------------------------------------------------------------------------------------- limits


def check_limits(message):
    assert 1 <= len(message["text"]) <= 4_000
    assert 1 <= len(message["blocks"]) <= 50
    json.dumps(message).encode()
    for block in message["blocks"]:
        kind = block["type"]
        limit = {"header": 150, "section": 3_000, "context": 3_000}[kind]
        for text in filter(None, [block.get("text"), *block.get("elements", ())]):
            assert 1 <= len(text["text"]) <= limit
        assert len(block.get("fields", ())) <= 10
        assert all(1 <= len(item["text"]) <= 2_000 for item in block.get("fields", ()))


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=200),
    st.text(max_size=4_500),
    st.dictionaries(st.text(max_size=200), st.one_of(st.none(), st.integers(), st.text(max_size=2_500)), max_size=23),
    st.none() | st.text() | st.text().map("https://host/".__add__),
)
def test_every_alert_fits_slacks_limits(title, text, fields, link):
    check_limits(to_slack(Alert(title, text, fields, link)))


@pytest.mark.parametrize("character", ["x", "&", "<", "ü", "维", "🔧", "\ud800", "\x00", " "])
def test_huge_alerts_are_cut_and_arrive(receiver, character):
    huge = character * 100_000
    fields = {f"{huge}{number}": huge for number in range(120)}
    alert = Alert(huge, huge, fields, f"http://localhost/{huge}")
    check_limits(to_slack(alert))
    assert send(receiver.url, alert).delivered
    check_limits(receiver.got[0])


def test_what_is_cut_says_so_and_cuts_no_escape():
    message = to_slack(Alert("t", "a" * 2_996 + "<" * 10, {f"f{n}": n for n in range(23)}))
    assert message["blocks"][1]["text"]["text"] == "a" * 2_996 + "…"
    assert [len(block["fields"]) for block in message["blocks"][2:4]] == [10, 10]
    assert message["blocks"][4]["elements"][0]["text"] == "3 more fields"


def test_nothing_in_an_alert_becomes_a_mention_or_a_link():
    message = to_slack(Alert("<!channel>", "<https://x|y> & z", {"<@U1>": "<!here>"}, "javascript:alert(1)"))
    assert message["text"] == "&lt;!channel&gt;: &lt;https://x|y&gt; &amp; z"
    assert message["blocks"][1]["text"]["text"] == "&lt;https://x|y&gt; &amp; z"
    assert message["blocks"][2]["fields"][0]["text"] == "*&lt;@U1&gt;*\n&lt;!here&gt;"
    assert len(message["blocks"]) == 3


def test_links_keep_their_meaning_and_end_where_they_end():
    link = to_slack(Alert("t", link="https://host/a b|c>?x=1&y=%20#z"))["blocks"][-1]["text"]["text"]
    assert link == "<https://host/a%20b%7Cc%3E?x=1&amp;y=%20#z|Open>"


def test_non_ascii_arrives_as_it_is(receiver):
    send(receiver.url, Alert("Störung an Linie 3 – Prüfung nötig 🔧", "温度异常", {"Gerät": "Kühlung"}))
    header, text, fields = receiver.got[0]["blocks"]
    assert header["text"]["text"] == "Störung an Linie 3 – Prüfung nötig 🔧"
    assert text["text"]["text"] == "温度异常"
    assert fields["fields"][0]["text"] == "*Gerät*\nKühlung"
