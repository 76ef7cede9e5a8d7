"""Which labels a lineage was trained on: the file beside the weights, and who inherits it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.errors import CheckpointError
from agentpipe.learning.policy.lineage import LABELS, labels_digest, pack_labels, trained_labels, unpack_labels
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe_tests.learning.test_trainer import run
from agentpipe_tests.learning.tiny import tiny_options

IDENTIFIERS = st.text(st.characters(exclude_categories=("Z", "C")), min_size=1, max_size=20).filter(
    lambda text: text.split() == [text]
)


@given(st.sets(IDENTIFIERS, max_size=20))
def test_label_ids_come_back_whatever_their_characters(ids):
    data = pack_labels(sorted(ids, key=hash))
    assert unpack_labels(data, Path("labels.txt")) == ids
    assert data == b"".join(sorted(label.encode() + b"\n" for label in ids))


@pytest.mark.parametrize("label", ["", "a b", "a\n", "\t", "a\u2028b"])
def test_an_id_with_white_space_is_refused(label):
    with pytest.raises(CheckpointError, match="not a label id"):
        pack_labels(["good", label])


@pytest.mark.parametrize("data", [b"b\na\n", b"a\na\n", b"a", b"\n", b"\xff\n"])
def test_a_file_that_was_not_written_so_is_refused(data):
    with pytest.raises(CheckpointError):
        unpack_labels(data, Path("labels.txt"))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return run(tmp_path_factory.mktemp("parent"), tiny_options(budget_steps=1), stop=lambda: True).package


def test_labels_are_sealed_with_the_package_and_no_part_of_its_digest(tmp_path, package):
    plain = package.save(tmp_path / "plain")
    assert trained_labels(plain) == frozenset()
    assert not (plain / LABELS).exists()
    package.labels = frozenset({"b", "a"})
    path = package.save(tmp_path / "package")
    assert (path / LABELS).read_text() == "a\nb\n"
    assert trained_labels(path) == {"a", "b"}
    found = PolicyPackage.load(path)
    assert found.labels == {"a", "b"}
    assert found.digest == PolicyPackage.load(plain).digest
    (path / LABELS).write_text("a\nb\nc\n")
    with pytest.raises(CheckpointError, match="does not match its digest"):
        trained_labels(path)
    (path / LABELS).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        trained_labels(path)


def test_a_retraining_inherits_the_labels_of_its_parent(tmp_path, package):
    package.labels = frozenset({"one", "two"})
    first = run(tmp_path / "a", tiny_options(budget_steps=512), initial=package)
    assert trained_labels(first.package_path) == {"one", "two"}
    asked = iter([True])
    options = tiny_options(budget_steps=1_024)
    part = run(tmp_path / "b", options, initial=package, stop=lambda: next(asked, True))
    again = run(tmp_path / "b", options, initial=package, resume=part.checkpoint)
    assert trained_labels(again.package_path) == {"one", "two"}
    with pytest.raises(CheckpointError, match="another package"):
        run(tmp_path / "b", options, resume=part.checkpoint)


def test_the_checkpoint_says_which_labels_its_lineage_was_trained_on(tmp_path, package):
    package.labels = frozenset({"one"})
    made = run(tmp_path, tiny_options(budget_steps=1), initial=package, stop=lambda: True)
    content = json.loads((made.checkpoint / "manifest.json").read_text())["content"]
    assert content["labels"] == labels_digest({"one"})


def test_reading_them_needs_no_torch():
    code = "import sys, agentpipe.learning.policy.lineage; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)
