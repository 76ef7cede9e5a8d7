"""Bundles: what is in them, that the same gives the same, and that no damage goes unnoticed."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from agentpipe.errors import BundleError, CheckpointError, HomeError, ParityError
from agentpipe.serving import bundle as bundle_module
from agentpipe.serving import layout
from agentpipe.serving.bundle import build_bundle, gate_figures, open_bundle
from agentpipe.serving.publish import publish_version, published_versions, withdraw_version
from agentpipe.serving.triton_config import config_text, read_config
from agentpipe.serving.verify import verify_bundle

from .conftest import make_package

ARGUMENTS = {"provenance": {"table_version": "t1"}, "evaluation": {"success": 0.5}}


def reseal(path):
    """Hashes anew, as someone would who wants a change to pass."""
    (path / layout.SUMS).write_bytes(layout.sums_text(layout.hash_files(path)))


@pytest.fixture
def quick_export(built, monkeypatch):
    """The export that ``built`` has already done, in place of another (three seconds each)."""

    def copy(_module, path, _signature):
        path.parent.mkdir(parents=True)
        path.write_bytes(built.export.path.read_bytes())
        return replace(built.export, path=path)

    monkeypatch.setattr(bundle_module, "export_policy", copy)


def test_a_bundle_is_a_triton_repository_with_provenance_and_hashes(built):
    assert sorted(layout.list_files(built.path)) == [
        "measurements.json",
        "policy/1/model.onnx",
        "policy/config.pbtxt",
        "provenance.json",
        "reference.safetensors",
        "signature.json",
    ]
    provenance = json.loads((built.path / "provenance.json").read_text())
    assert provenance["built_from"] == {"table_version": "t1"}
    assert provenance["evaluation"] == {"success": 0.5}
    assert provenance["promotable"] is True
    assert len(provenance["package"]["digest"]) == 64
    assert built.path.name == f"bundle-{built.digest[:16]}"


def test_the_sums_are_those_of_sha256sum(built):
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=built.path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_configuration_leaves_the_batch_out_and_batches_with_ten_milliseconds(built):
    config = read_config(built.path / "policy" / "config.pbtxt")
    assert config.max_batch_size == 64
    assert [(entry.name, list(entry.dims)) for entry in config.input] == [
        ("observation", [192]),
        ("last_action", [1]),
        ("time", [1]),
        ("mask", [46]),
    ]
    assert config.dynamic_batching.max_queue_delay_microseconds == 10_000
    assert list(config.dynamic_batching.preferred_batch_size) == [16, 32, 64]
    assert config.version_policy.latest.num_versions == 2
    assert [(group.kind, group.count) for group in config.instance_group] == [(2, 1)]  # 2 = KIND_CPU
    assert [sample.batch_size for sample in config.model_warmup] == [1, 64]
    assert set(config.model_warmup[0].inputs) == {"observation", "last_action", "time", "mask"}


def test_a_fresh_bundle_verifies_and_opens_with_the_same_figures(built):
    report = verify_bundle(built.path)
    assert report.ok
    assert report.digest == built.digest
    assert report.files == 7
    assert report.max_abs_probability <= 1e-5
    assert open_bundle(built.path) == built
    json.dumps(report.to_json())
    json.dumps(built.figures())


def test_the_same_package_gives_the_same_directory_and_is_not_built_twice(built, package_dir):
    stamp = (built.path / "measurements.json").stat().st_mtime_ns
    again = build_bundle(package_dir, built.path.parent, promotable=True, **ARGUMENTS)
    assert again == built
    assert (built.path / "measurements.json").stat().st_mtime_ns == stamp
    assert [path.name for path in built.path.parent.iterdir()] == [built.path.name]


def test_a_damaged_bundle_of_the_same_content_is_built_again(built, package_dir, tmp_path, quick_export):
    first = build_bundle(package_dir, tmp_path, promotable=True, **ARGUMENTS)
    assert first.digest == built.digest
    (first.path / "policy" / "1" / "model.onnx").write_bytes(b"damaged")
    assert verify_bundle(build_bundle(package_dir, tmp_path, promotable=True, **ARGUMENTS).path).ok


def test_a_bundle_that_is_not_promotable_says_why(package_dir, tmp_path, quick_export):
    with pytest.raises(BundleError, match="says why"):
        build_bundle(package_dir, tmp_path, promotable=False, **ARGUMENTS)
    with pytest.raises(BundleError, match="says why"):
        build_bundle(package_dir, tmp_path, promotable=True, reasons=["why"], **ARGUMENTS)
    made = build_bundle(package_dir, tmp_path, promotable=False, reasons=["demo profile"], **ARGUMENTS)
    assert verify_bundle(made.path).reasons == ("demo profile",)


def test_a_failing_parity_publishes_nothing_and_leaves_the_package_alone(
    package_dir, tmp_path, monkeypatch, quick_export
):
    def fail(*_, **__):
        raise ParityError("graph and policy disagree", case="recorded")

    before = layout.hash_files(package_dir)
    monkeypatch.setattr(bundle_module, "check_parity", fail)
    with pytest.raises(ParityError):
        build_bundle(package_dir, tmp_path / "out", promotable=True, **ARGUMENTS)
    assert list((tmp_path / "out").iterdir()) == []
    assert layout.hash_files(package_dir) == before


def test_a_damaged_package_publishes_nothing(tmp_path):
    make_package(tmp_path / "package")
    weights = tmp_path / "package" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError):
        build_bundle(tmp_path / "package", tmp_path / "out", promotable=True, **ARGUMENTS)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_typed_error(package_dir, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HomeError):
        build_bundle(package_dir, tmp_path / "file" / "out", promotable=True, **ARGUMENTS)


@pytest.mark.parametrize(
    "name",
    [
        "measurements.json",
        "policy/1/model.onnx",
        "policy/config.pbtxt",
        "provenance.json",
        "reference.safetensors",
        "signature.json",
    ],
)
def test_one_flipped_bit_in_any_file_is_named(bundle_copy, name):
    data = bytearray((bundle_copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle_copy / name).write_bytes(data)
    with pytest.raises(BundleError) as caught:
        verify_bundle(bundle_copy)
    assert caught.value.where["file"] == name


def test_a_missing_an_extra_and_a_linked_file_are_named(bundle_copy, tmp_path):
    (bundle_copy / "policy" / "1" / "more.bin").write_bytes(b"")
    with pytest.raises(BundleError, match="not listed") as caught:
        verify_bundle(bundle_copy)
    assert caught.value.where["file"] == "policy/1/more.bin"
    (bundle_copy / "policy" / "1" / "more.bin").unlink()
    (bundle_copy / "reference.safetensors").unlink()
    with pytest.raises(BundleError, match="missing") as caught:
        verify_bundle(bundle_copy)
    assert caught.value.where["file"] == "reference.safetensors"
    (tmp_path / "elsewhere").write_bytes(b"x")
    (bundle_copy / "reference.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="neither a plain file"):
        verify_bundle(bundle_copy)


def test_an_extra_file_that_is_listed_does_not_belong_either(bundle_copy):
    (bundle_copy / "policy" / "1" / "model.py").write_text("print('hello')")
    reseal(bundle_copy)
    with pytest.raises(BundleError, match="does not belong"):
        verify_bundle(bundle_copy)


def test_sums_whose_last_line_break_is_damaged_were_accepted(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    sums = layout.sums_text(layout.hash_files(tmp_path))
    for damaged in (sums[:-1], sums[:-1] + b"\x0b", sums + b"x", sums + b"\n"):
        (tmp_path / "SHA256SUMS").write_bytes(damaged)
        with pytest.raises(BundleError) as caught:
            layout.check_files(tmp_path)
        assert caught.value.where["file"] == "SHA256SUMS"
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "SHA256SUMS").mkdir()
    with pytest.raises(BundleError, match="cannot be read"):
        layout.check_files(tmp_path)


def test_no_bundle_at_all_and_no_sums(tmp_path):
    with pytest.raises(BundleError, match="missing") as caught:
        verify_bundle(tmp_path)
    assert caught.value.where["file"] == "SHA256SUMS"
    (tmp_path / "SHA256SUMS").write_text("nonsense\n")
    with pytest.raises(BundleError, match="malformed"):
        verify_bundle(tmp_path)


def change_config(path, change):
    file = path / "policy" / "config.pbtxt"
    config = read_config(file)
    change(config)
    file.write_text(config_text(config))
    reseal(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c.input[0].dims.__setitem__(0, 193), "dims"),
        (lambda c: c.input[0].dims.insert(0, -1), "dims"),
        (lambda c: setattr(c.input[1], "data_type", 8), "TYPE_INT32"),
        (lambda c: setattr(c.output[0], "name", "act"), "outputs are"),
        (lambda c: setattr(c, "max_batch_size", 0), "no batching"),
        (lambda c: setattr(c, "name", "other"), "called"),
    ],
)
def test_a_configuration_that_does_not_fit_the_graph_is_refused(bundle_copy, change, match):
    change_config(bundle_copy, change)
    with pytest.raises(BundleError, match=match) as caught:
        verify_bundle(bundle_copy)
    assert str(caught.value.where["file"]) == "policy/config.pbtxt"


def test_a_configuration_that_is_not_one_is_refused(bundle_copy):
    (bundle_copy / "policy" / "config.pbtxt").write_text("name: policy {{{")
    reseal(bundle_copy)
    with pytest.raises(BundleError, match="not a Triton model configuration"):
        verify_bundle(bundle_copy)


def change_graph(path, change):
    file = path / "policy" / "1" / "model.onnx"
    model = onnx.load(file)
    change(model)
    onnx.save(model, file)
    reseal(path)


def test_a_fixed_batch_is_refused(bundle_copy):
    def fix(model):
        dimension = model.graph.input[0].type.tensor_type.shape.dim[0]
        dimension.Clear()
        dimension.dim_value = 1

    change_graph(bundle_copy, fix)
    with pytest.raises(BundleError, match=r"batch dimension is fixed|not a valid ONNX"):
        verify_bundle(bundle_copy)


def test_other_weights_with_correct_hashes_fail_the_reference_rows(bundle_copy):
    def disturb(model):
        tensor = max(model.graph.initializer, key=lambda t: np.prod(t.dims))
        array = onnx.numpy_helper.to_array(tensor).copy()
        array.flat[:50] += 0.5
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    change_graph(bundle_copy, disturb)
    with pytest.raises(ParityError):
        verify_bundle(bundle_copy)


def test_reference_rows_of_another_size_or_of_no_format_are_refused(bundle_copy):
    file = bundle_copy / "reference.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "action": tensors["action"][:-1]}, file)
    reseal(bundle_copy)
    with pytest.raises(BundleError, match="do not fit"):
        verify_bundle(bundle_copy)
    file.write_bytes(b"\x80\x04K\x01.")  # a pickle
    reseal(bundle_copy)
    with pytest.raises(BundleError, match="cannot be read"):
        verify_bundle(bundle_copy)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("provenance.json", "[]", "not a JSON object"),
        ("provenance.json", "{", "not valid JSON"),
        ("provenance.json", '{"format": 99}', "format 99"),
        ("provenance.json", '{"format": 1}', "malformed"),
        ("signature.json", "{}", "malformed signature"),
        ("signature.json", '{"version": 7}', "signature version 7"),
    ],
)
def test_malformed_json_of_any_kind_is_a_typed_error(bundle_copy, file, content, match):
    (bundle_copy / file).write_text(content)
    reseal(bundle_copy)
    with pytest.raises(BundleError, match=match) as caught:
        verify_bundle(bundle_copy)
    assert str(caught.value.where["file"]) == file


def test_gate_figures(built):
    figures = gate_figures(built, champion_package_bytes=1000)
    assert figures["checkpoint_bytes"] == built.package_bytes > 0
    assert figures["champion_checkpoint_bytes"] == 1000
    assert figures["unsupported_operators"] == []
    assert 0 < figures["latency_p99_ms"] < 1000
    assert figures["parity_max_abs_diff"] <= 1e-5
    assert figures["parity_value_max_rel_diff"] <= 1e-5


def test_publishing_adds_versions_by_rename_and_withdrawing_takes_the_newest_back(built, tmp_path):
    live = tmp_path / "live"
    assert publish_version(built.path, live) == live / "policy" / "1"
    assert publish_version(built.path, live) == live / "policy" / "2"
    assert published_versions(live / "policy") == [1, 2]
    with pytest.raises(BundleError, match="exists already"):
        publish_version(built.path, live, version=2)
    aside = withdraw_version(live, "policy", 2)
    assert (aside / "model.onnx").is_file()
    assert published_versions(live / "policy") == [1]
    with pytest.raises(BundleError, match="only version"):
        withdraw_version(live, "policy", 1)
    assert [path.name for path in live.iterdir()] == ["policy"]


def test_a_damaged_bundle_is_not_published(bundle_copy, tmp_path):
    (bundle_copy / "policy" / "1" / "model.onnx").write_bytes(b"")
    with pytest.raises(BundleError):
        publish_version(bundle_copy, tmp_path / "live")
    assert not (tmp_path / "live").exists()
