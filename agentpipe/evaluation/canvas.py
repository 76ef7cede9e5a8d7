"""Drawing without global state: small figures as PNG files that fit into an event."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from agentpipe.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 12_000
"""Most bytes of one PNG: 16,000 characters in base64."""

INK, MUTED, GRID, PAPER = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"
BLUE, ORANGE, TEAL, RED, GREY, LIGHT = "#1d5fa8", "#d9822b", "#2a9d8f", "#c0392b", "#4a5568", "#b8c0ca"
SERIES = (BLUE, ORANGE, TEAL, RED, "#7b5ea7", GREY)
PLAYER_COLOURS = {"policy": BLUE, "rules": ORANGE, "diagnoser": TEAL, "oracle": GREY, "random": LIGHT}
_ATTEMPTS = ((120, 64), (110, 48), (100, 32), (90, 32), (80, 24), (72, 16), (60, 16), (48, 8))


def player_colour(name: str) -> str:
    """The colour of a player in every plot."""
    return PLAYER_COLOURS.get(name, "#7b5ea7")


def new_figure(width: float = 7.0, height: float = 3.2, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure of ``width`` x ``height`` inches and its axes side by side, not registered anywhere."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(LIGHT)
        ax.tick_params(colors=MUTED, labelsize=8, length=0)
        ax.set_axisbelow(True)
    return figure, axes


def title(ax: Any, text: str, note: str = "") -> None:  # noqa: ANN401 - matplotlib publishes no types
    """A bold title at the left, with a muted note in a second line."""
    ax.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK, pad=20 if note else 8)
    if note:
        ax.text(0, 1.0, note, transform=ax.transAxes, fontsize=8, color=MUTED, va="bottom", ha="left", linespacing=1.4)


def legend(ax: Any, columns: int = 3) -> None:  # noqa: ANN401 - matplotlib publishes no types
    """A legend below the axes, without a frame."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, frameon=False, fontsize=8, labelcolor=INK)


def percent_axis(axis: Any) -> None:  # noqa: ANN401 - matplotlib publishes no types
    """Labels an x or y axis that holds shares in percent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _encode(figure: Any, dots: int, colours: int) -> bytes:  # noqa: ANN401 - matplotlib publishes no types
    from PIL import Image

    figure.set_dpi(dots)
    figure.canvas.draw()
    image = Image.frombuffer("RGBA", figure.canvas.get_width_height(), bytes(figure.canvas.buffer_rgba())).convert(
        "RGB"
    )
    small = image.quantize(colors=colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def png(figure: Any, limit: int = LIMIT) -> bytes:  # noqa: ANN401 - matplotlib publishes no types
    """The figure as a palette PNG of at most ``limit`` bytes, as sharp as fits.

    Raises:
        EvaluationError: it does not fit even at the lowest resolution.
    """
    for dots, colours in _ATTEMPTS:
        data = _encode(figure, dots, colours)
        if len(data) <= limit:
            return data
    raise EvaluationError(f"the plot does not fit into {limit} bytes", remedy="plot fewer things at once")


def markdown_image(data: bytes, alt: str) -> str:
    """A PNG as a Markdown image that needs no file."""
    return f"![{alt}](data:image/png;base64,{base64.b64encode(data).decode()})"


def thin(values: Sequence[float], most: int = 400) -> list[int]:
    """At most ``most`` evenly spread positions of ``values``, first and last among them."""
    count = len(values)
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]
