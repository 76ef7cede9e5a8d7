import base64
import io

import numpy as np
import pytest
from PIL import Image

from agentpipe.environments.layout import MODES, REASONS, SEGMENTS
from agentpipe.errors import EvaluationError
from agentpipe.evaluation import plots, run_plots
from agentpipe.evaluation.canvas import LIMIT, markdown_image, new_figure, png, thin
from agentpipe.evaluation.drift import DriftResult

CELLS = [f"{kind}-{intensity}" for kind in ("sensor", "network", "load") for intensity in range(1, 6)]


def share(rng, base):
    value = float(np.clip(base + rng.normal() * 0.04, 0, 1))
    return {
        "success": value,
        "ci95": [max(0.0, value - 0.03), min(1.0, value + 0.03)],
        "episodes": 800,
        "environments": 200,
    }


def example_summary():
    """Figures of the size that a real evaluation has: five players, 15 cells, ten modes."""
    rng, players = np.random.default_rng(0), {}
    for name, base, seconds in (
        ("policy", 0.9, 3.1), ("random", 0.02, 9.5), ("rules", 0.5, 6.2), ("diagnoser", 0.63, 5.4),
        ("oracle", 0.98, 2.2),
    ):  # fmt: skip
        players[name] = {
            **share(rng, base),
            "episodes": 12_000,
            "failures": int(12_000 * (1 - base)),
            "decision_seconds": seconds,
            "decision_seconds_ci95": [seconds - 0.2, seconds + 0.2],
            "by_cell": {cell: share(rng, base - 0.03 * (int(cell[-1]) - 3)) for cell in CELLS},
            "by_mode": {mode: share(rng, base - 0.02 * index) for index, mode in enumerate(MODES)},
            "failures_by_segment": dict(zip(SEGMENTS, (500, 250, 100, 350), strict=True)),
            "failures_by_reason": {reason: 400 - 50 * index for index, reason in enumerate(REASONS[1:])},
        }
    return {"players": players}


def example_attribution():
    counts = {"sensor": 300, "network": 200, "load": 90, "compound": 150, "policy_or_information": 160}
    return {
        "causes": {name: {"count": count, "share": count / 900} for name, count in counts.items()},
        "by_segment": {segment: {k: v // (i + 1) for k, v in counts.items()} for i, segment in enumerate(SEGMENTS)},
        "replayed": 900,
        "attributed": 0.822,
    }


def example_drift():
    rng = np.random.default_rng(1)
    cells = {cell: {"status": "OK", "kl": float(rng.random() * 0.2), "rows": 900} for cell in CELLS}
    cells["load-5"] = {"status": "INSUFFICIENT_DATA", "kl": None, "rows": 12}
    return DriftResult("OK", 13_000, "r", 0.15, kl=0.0912, ci95=[0.08, 0.1], by_cell=cells)


def latencies():
    rng = np.random.default_rng(2)
    return {cell: np.exp(rng.normal(0.5 + 0.1 * index, 0.4, 500)) for index, cell in enumerate(CELLS)}


def curves():
    steps = np.arange(0, 16_000_000, 20_000)
    rise = 0.92 * (1 - np.exp(-steps / 3e6))
    noise = np.random.default_rng(3).normal(size=(2, steps.size)) * 0.01
    return steps, {"validation success": rise + noise[0], "training success": rise - 0.02 + noise[1]}


EXAMPLES = {
    "success_by_cell": lambda: plots.success_by_cell(example_summary()),
    "success_by_mode": lambda: plots.success_by_mode(example_summary()),
    "failures": lambda: plots.failures(example_summary()),
    "decision_time": lambda: plots.decision_time(example_summary()),
    "causes": lambda: plots.causes(example_attribution()),
    "drift_by_cell": lambda: plots.drift_by_cell(example_drift()),
    "reset_latency": lambda: run_plots.reset_latency(latencies(), 800.0),
    "steps_per_second": lambda: run_plots.steps_per_second({cell: 2.1e6 + 3e4 * i for i, cell in enumerate(CELLS)}),
    "training_curve": lambda: run_plots.training_curve(*curves(), target=0.897, ylabel="Success while training"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plot_is_a_readable_png_that_fits_into_an_event(name):
    data = EXAMPLES[name]()
    image = Image.open(io.BytesIO(data))
    image.load()
    assert len(data) <= LIMIT
    assert len(markdown_image(data, name)) <= 16_100
    assert image.width >= 500
    assert len(np.unique(np.asarray(image.convert("L")))) > 5  # something was drawn


def test_equal_figures_give_equal_bytes():
    assert EXAMPLES["success_by_mode"]() == EXAMPLES["success_by_mode"]()


def test_no_figure_is_kept_by_pyplot():
    from matplotlib._pylab_helpers import Gcf

    before = len(Gcf.figs)
    EXAMPLES["failures"]()
    assert len(Gcf.figs) == before


def test_the_heat_map_darkens_with_success():
    def middle(value):
        cells = {"sensor-1": {"success": value, "ci95": [value, value], "episodes": 1, "environments": 1}}
        summary = {"players": {"policy": {"success": value, "episodes": 1, "by_cell": cells}}}
        image = np.asarray(Image.open(io.BytesIO(plots.success_by_cell(summary))).convert("RGB"), dtype=int)
        height, width, _ = image.shape
        return image[height // 2, width // 4]  # beside the number

    bad, good = middle(0.0), middle(1.0)
    assert bad[0] > bad[2] + 60  # red
    assert good[2] > good[0] + 60  # blue


def test_one_player_without_failures_can_be_drawn():
    figures = {
        **share(np.random.default_rng(0), 1.0), "failures": 0, "failures_by_segment": {}, "failures_by_reason": {},
        "by_cell": {}, "by_mode": {}, "decision_seconds": 1.0, "decision_seconds_ci95": [None, None],
    }  # fmt: skip
    summary = {"players": {"policy": figures}}
    for draw in (plots.failures, plots.decision_time):
        assert draw(summary).startswith(b"\x89PNG")


def test_an_attribution_without_failures_can_be_drawn():
    none = {"causes": {name: {"count": 0, "share": None} for name in ("sensor",)}, "replayed": 0, "attributed": None}
    assert plots.causes(none).startswith(b"\x89PNG")


@pytest.mark.parametrize("bad", [[], [np.nan], [-1.0], {}])
def test_impossible_latencies_are_refused(bad):
    with pytest.raises(EvaluationError, match="latencies"):
        run_plots.reset_latency(bad, 800.0)


@pytest.mark.parametrize("bad", [{}, {"sensor-1": np.inf}])
def test_impossible_speeds_are_refused(bad):
    with pytest.raises(EvaluationError, match="steps a second"):
        run_plots.steps_per_second(bad)


def test_a_curve_of_another_length_is_refused():
    with pytest.raises(EvaluationError, match="'loss' has 1 values for 2 steps"):
        run_plots.training_curve([0, 1], {"loss": [1.0]})
    with pytest.raises(EvaluationError, match="nothing to plot"):
        run_plots.training_curve([], {})


def test_a_curve_with_gaps_can_be_drawn():
    assert run_plots.training_curve([0, 1, 2], {"a": [np.nan, 1.0, np.nan], "b": [np.nan] * 3}).startswith(b"\x89PNG")


def test_thinning_keeps_both_ends():
    assert thin(range(5)) == [0, 1, 2, 3, 4]
    kept = thin(range(10_000), 100)
    assert (kept[0], kept[-1], len(kept), sorted(set(kept)) == kept) == (0, 9_999, 100, True)


def test_what_cannot_fit_is_an_error():
    figure, _ = new_figure()
    with pytest.raises(EvaluationError, match="does not fit"):
        png(figure, limit=100)


def test_a_markdown_image_holds_the_bytes():
    text = markdown_image(b"abc", "three letters")
    assert text == f"![three letters](data:image/png;base64,{base64.b64encode(b'abc').decode()})"
