"""Whether what a server answers is a decision at all: every output there, of its dtype and shape, finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.errors import AnswerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentpipe.serving.signature import Signature


def check_answer(
    signature: Signature, rows: int, outputs: Mapping[str, npt.NDArray[Any] | None]
) -> dict[str, npt.NDArray[Any]]:
    """The outputs of ``signature``, out of what a server answered to ``rows`` rows.

    Raises:
        AnswerError: an output is missing, of another dtype or shape, or not finite; or an action is neither -1 nor one
            of the policy's. The message names the output and the row.
    """
    remedy = "the server runs another model, or is broken: compare it with the bundle (agentpipe bundle check)"
    found: dict[str, npt.NDArray[Any]] = {}
    for spec in signature.outputs:
        array = outputs.get(spec.name)
        if array is None:
            raise AnswerError(f"the answer has no {spec.name}", field=spec.name, remedy=remedy)
        if array.dtype != spec.numpy:
            text = f"{spec.name} of the answer is {array.dtype}, not {spec.dtype}"
            raise AnswerError(text, field=spec.name, remedy=remedy)
        if array.shape != (rows, *spec.dims):
            text = f"{spec.name} of the answer has shape {list(array.shape)}, not {[rows, *spec.dims]}"
            raise AnswerError(text, field=spec.name, remedy=remedy)
        wrong = ~np.isfinite(array).all(axis=1)
        if spec.name == "action":
            wrong = ((array < -1) | (array >= signature.action_count)).any(axis=1)
        if wrong.any():
            row = int(wrong.argmax())
            text = f"{spec.name} of the answer is {array[row].tolist() if array.shape[1] == 1 else 'not finite'}"
            raise AnswerError(text, field=spec.name, row=row, remedy=remedy)
        found[spec.name] = array
    return found
