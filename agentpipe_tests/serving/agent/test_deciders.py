"""Deciders without a network: a bundle's graph in this process, rules, and what counts as an answer."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from agentpipe.environments.layout import ACTION_COUNT, ACTION_NAMES, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.environments.rules import RulesPlayer
from agentpipe.errors import BundleError, ParityError, ServingError
from agentpipe.serving import layout
from agentpipe.serving.agent.answers import checked_answer
from agentpipe.serving.agent.deciders import LocalDecider, RulesDecider, read_policy
from agentpipe.serving.signature import policy_signature
from agentpipe.serving.verify import verify_bundle
from agentpipe.storage import read_json, write_json
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.environments.line import catalog, make_pool, profile
from agentpipe_tests.serving.agent.frames import frame, pool_frame

LINE = policy_signature(OBSERVATION_SIZE, ACTION_COUNT, observation_names=OBSERVATION_NAMES, action_names=ACTION_NAMES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("even") / "bundle"
    save_bundle(folder, 0)
    return folder


def outputs(**changes):
    good = {
        "action": np.array([[2]]),
        "probabilities": np.array([[0.25, 0.0, 0.75]], np.float32),
        "value": np.array([[1.5]], np.float32),
    }
    return {**good, **changes}


# What is an answer.


def test_an_answer_has_action_probabilities_value_and_says_whose_it_is():
    answer = checked_answer(frame(), outputs(), "someone", "v1")
    assert (answer.action, answer.value, answer.decided_by, answer.policy_version) == (2, 1.5, "someone", "v1")
    assert answer.probabilities.tolist() == [0.25, 0.0, 0.75]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"action": np.array([[1]])}, "action 1 is not allowed"),
        ({"action": np.array([[3]])}, "action 3 of 3"),
        ({"action": np.array([[-2]])}, "action -2 of 3"),
        ({"action": np.array([[-1]])}, "no action, although some are allowed"),
        ({"action": np.array([[2]], np.int32)}, "action is int32"),
        ({"action": np.array([[2], [2]])}, r"action is int64\[2, 1\]"),
        ({"probabilities": np.array([[0.5, 0.5]], np.float32)}, r"probabilities are float32\[1, 2\]"),
        ({"probabilities": np.array([[0.25, 0.0, 0.75]])}, "probabilities are float64"),
        ({"probabilities": np.array([[np.nan, 0.0, 0.75]], np.float32)}, "sum to nan"),
        ({"probabilities": np.array([[np.inf, 0.0, 0.75]], np.float32)}, "sum to inf"),
        ({"probabilities": np.array([[0.25, 0.0, 0.5]], np.float32)}, "sum to 0.75"),
        ({"probabilities": np.array([[-0.25, 0.0, 1.25]], np.float32)}, "probabilities from -0.25"),
        ({"probabilities": np.array([[0.25, 0.25, 0.5]], np.float32)}, "a forbidden action has a probability"),
        ({"value": np.array([[np.nan]], np.float32)}, "value is not finite"),
        ({"value": np.array([[1.0, 2.0]], np.float32)}, r"value is float32\[1, 2\]"),
    ],
)
def test_nonsense_is_no_answer(changes, match):
    with pytest.raises(ServingError, match=match):
        checked_answer(frame(), outputs(**changes), "someone", "v1")


def test_no_action_is_the_answer_where_none_is_allowed():
    nothing = {"action": np.array([[-1]]), "probabilities": np.zeros((1, 3), np.float32)}
    assert checked_answer(frame(mask=(False,) * 3), outputs(**nothing), "someone", "v1").action == -1


# The bundle's graph in this process.


def test_the_local_policy_answers_like_the_bundle_it_came_from(bundle):
    decider = LocalDecider(bundle)
    answer = decider.decide(frame((0.25, -1.0), (False, True, True)), 1.0)
    assert (answer.action, answer.value) == (1, -0.75)
    assert answer.probabilities.tolist() == [0.0, 0.5, 0.5]
    assert decider.decide(frame(mask=(True, False, False)), 1.0).probabilities.tolist() == [1.0, 0.0, 0.0]
    decider.probe(1.0)


def test_a_damaged_bundle_is_refused_at_the_start(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    graph = copy / "policy" / "1" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"policy/1/model\.onnx"):
        LocalDecider(copy)


def provenance(change):
    def harm(folder):
        content = read_json(folder / layout.PROVENANCE)
        change(content)
        write_json(folder / layout.PROVENANCE, content)

    return harm


def graph(change):
    def harm(folder):
        file = folder / "policy" / "1" / "model.onnx"
        model = onnx.load(file)
        change(model.graph)
        onnx.save(model, file)

    return harm


def batch_of_one(made):
    made.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def other_width(made):
    made.input[0].type.tensor_type.shape.dim[1].dim_value = 7


def last_input_first(made):
    values = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in made.input]
    del made.input[:]
    made.input.extend(values[::-1])


REFUSED = {
    "another model beside it": lambda folder: shutil.copytree(folder / "policy", folder / "evil"),
    "another version beside it": lambda folder: shutil.copytree(folder / "policy" / "1", folder / "policy" / "2"),
    "a file that does not belong there": lambda folder: (folder / "notes.txt").touch(),
    "no configuration": lambda folder: (folder / "policy" / layout.CONFIG).unlink(),
    "no reference rows": lambda folder: (folder / layout.REFERENCE).unlink(),
    "another format": provenance(lambda said: said.update(format=9)),
    "promotable with reasons": provenance(lambda said: said.update(reasons=["worse"])),
    "not promotable without": provenance(lambda said: said.update(promotable=False)),
    "promotable as a text": provenance(lambda said: said.update(promotable="yes")),
    "a package that is a list": provenance(lambda said: said.update(package=[1])),
    "a model outside": provenance(lambda said: said["model"].update(name="../policy")),
    "a negative version": provenance(lambda said: said["model"].update(version=-1)),
    "a fixed batch": graph(batch_of_one),
    "another width": graph(other_width),
    "inputs in another order": graph(last_input_first),
}


@pytest.mark.parametrize("harm", REFUSED)
def test_what_verifying_refuses_the_agent_refuses(bundle, tmp_path, harm):
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    REFUSED[harm](broken)
    (broken / layout.SUMS).write_bytes(layout.sums_text(layout.hash_files(broken)))
    for look in (verify_bundle, LocalDecider):
        with pytest.raises(BundleError):
            look(broken)


ROWS = {
    "none": lambda tensors: {name: array[:0] for name, array in tensors.items()},
    "none that allow anything": lambda tensors: {**tensors, "mask": np.zeros_like(tensors["mask"])},
    "fewer answers": lambda tensors: {**tensors, "action": tensors["action"][:1]},
    "without a batch": lambda tensors: {**tensors, "mask": tensors["mask"][0]},
    "no mask": lambda tensors: {name: array for name, array in tensors.items() if name != "mask"},
}


@pytest.mark.parametrize("rows", ROWS)
def test_known_rows_that_tell_nothing_are_refused_at_the_first_probe(bundle, tmp_path, rows):
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    tensors = ROWS[rows](load_file(broken / layout.REFERENCE))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, broken / layout.REFERENCE)
    (broken / layout.SUMS).write_bytes(layout.sums_text(layout.hash_files(broken)))
    with pytest.raises((BundleError, ServingError)):
        LocalDecider(broken).probe(1.0)


def test_a_graph_that_answers_known_rows_otherwise_fails_its_probe(bundle):
    decider = LocalDecider(bundle)
    decider.probe(1.0)
    known = decider._known
    decider._known = dataclasses.replace(known, value=known.value + np.float32(1e-3))
    with pytest.raises(ParityError, match="answered otherwise"):
        decider.probe(1.0)


def test_a_frame_of_another_line_is_refused(bundle):
    with pytest.raises(ServingError, match=r"\(\(3,\), \(3,\)\), the policy takes \(\(2,\), \(3,\)\)"):
        LocalDecider(bundle).decide(frame((1.0, 2.0, 3.0)), 1.0)


def test_the_policy_version_is_the_packages_digest_where_the_bundle_names_one(tmp_path):
    digest = save_bundle(tmp_path / "bundle", 0)
    assert read_policy(tmp_path / "bundle").version == digest
    provenance = read_json(tmp_path / "bundle" / layout.PROVENANCE)
    write_json(tmp_path / "bundle" / layout.PROVENANCE, {**provenance, "package": {"digest": "abc"}})
    (tmp_path / "bundle" / layout.SUMS).write_bytes(layout.sums_text(layout.hash_files(tmp_path / "bundle")))
    assert LocalDecider(tmp_path / "bundle").policy_version == "abc"


def test_a_local_decider_needs_none_of_the_heavy_libraries(bundle):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from agentpipe.serving.agent.deciders import LocalDecider, RulesDecider\n"
        "from agentpipe.serving.signature import policy_signature\n"
        "from agentpipe.environments.layout import ACTION_NAMES as A, OBSERVATION_NAMES as O\n"
        "RulesDecider(policy_signature(len(O), len(A), observation_names=O, action_names=A))\n"
        f"LocalDecider(Path({str(bundle)!r})).probe(1.0)\n"
        "heavy = ['torch', 'numba', 'pandas', 'pyarrow', 'plyvel', 'scipy', 'onnx', 'tritonclient', 'grpc']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# Rules.


def test_rules_answer_a_question_as_they_answer_the_pool_that_asks_it():
    pool, player, decider = (
        make_pool(catalog().environments("validation")[:20]),
        RulesPlayer(profile()),
        RulesDecider(LINE),
    )
    for _ in range(50):
        actions = player.act(pool).actions
        answers = [decider.decide(pool_frame(pool, row)) for row in range(pool.size)]
        assert [answer.action for answer in answers] == actions.tolist()
        assert all(answer.probabilities[answer.action] == 1.0 for answer in answers)
        pool.step(actions)
    assert decider.policy_version == "rules-1.0.0"


def test_rules_hold_the_last_action_where_their_own_choice_is_forbidden_then_ask_a_person():
    pool, decider = make_pool(catalog().environments("validation")[:1]), RulesDecider(LINE)
    seen = pool_frame(pool)
    mask = np.zeros(ACTION_COUNT, np.bool_)
    choice = decider.decide(seen).action
    mask[(choice + 1) % 8] = True
    held = frame(seen.observation, mask, last=(choice + 1) % 8)
    assert [decider.decide(held).action for _ in range(4)] == [(choice + 1) % 8] * 3 + [-1]
    other = frame(seen.observation, mask, last=(choice + 1) % 8, order="o2")
    assert decider.decide(other).notes == ("the last action is held",)


def test_a_line_that_the_rules_do_not_know_gets_its_last_action_or_a_person():
    decider = RulesDecider(policy_signature(2, 3, observation_names=["a", "b"], action_names=["x", "y", "z"]))
    assert decider.policy_version == "rules-hold"
    assert decider.decide(frame(last=2)).action == 2
    assert decider.decide(frame(last=1)).action == -1
    assert decider.decide(frame()).action == -1


def test_rules_stand_a_sensor_that_says_nothing():
    pool, decider = make_pool(catalog().environments("validation")[:1]), RulesDecider(LINE)
    seen = pool_frame(pool)
    seen.observation[:40] = np.nan
    assert pool.mask[0, decider.decide(seen).action]
