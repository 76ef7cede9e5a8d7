"""Reference rows of a bundle: inputs, and what the torch policy answered. Plain tensors, nothing that could run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from agentpipe.errors import BundleError
from agentpipe.serving.inputs import PolicyInputs
from agentpipe.serving.parity import BATCHES, CaseFigures, compare, parity_cases
from agentpipe.serving.runtime import Outputs, run_module, run_session
from agentpipe.serving.signature import MEMORY, MEMORY_NEXT
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime
    import torch

    from agentpipe.serving.signature import Signature

ROWS_PER_CASE: Final = 128
_REMEDY: Final = "build the bundle again"


def reference_inputs(recorded: PolicyInputs, *, seed: int = 0) -> PolicyInputs:
    """Up to 128 rows of each case of :func:`~agentpipe.serving.parity.parity_cases`."""
    cases = parity_cases(recorded, seed=seed)
    return PolicyInputs.concatenate([inputs.rows(slice(0, ROWS_PER_CASE)) for inputs in cases.values()])


def write_reference(path: Path, module: torch.nn.Module, inputs: PolicyInputs) -> None:
    """Writes ``inputs`` and the answers of ``module`` as safetensors."""
    from safetensors.numpy import save

    answers = run_module(module, inputs)
    tensors = {
        "observation": inputs.observation,
        "last_action": inputs.last_action,
        "time": inputs.time,
        "mask": inputs.mask,
        "action": answers.action,
        "probabilities": answers.probabilities,
        "value": answers.value,
    }
    if inputs.memory.shape[1]:
        tensors |= {MEMORY: inputs.memory, MEMORY_NEXT: answers.memory}
    write_bytes(path, save({name: np.ascontiguousarray(array) for name, array in tensors.items()}))


def read_reference(path: Path, signature: Signature) -> tuple[PolicyInputs, Outputs]:
    """Reads what :func:`write_reference` wrote.

    Raises:
        BundleError: not safetensors, a tensor is missing, or sizes are not those of ``signature``.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(path.read_bytes())
        names = ("observation", "last_action", "time", "mask", *([MEMORY] if signature.memory_size else []))
        inputs = PolicyInputs(*(tensors[name] for name in names))
        remembered = tensors[MEMORY_NEXT] if signature.memory_size else inputs.memory
        outputs = Outputs(tensors["action"], tensors["probabilities"], tensors["value"], remembered)
    except (OSError, SafetensorError, KeyError) as error:
        raise BundleError(f"reference rows cannot be read: {error!r}", file=path.name, remedy=_REMEDY) from error
    sizes = (inputs.observation.shape[1], inputs.mask.shape[1], inputs.memory.shape[1])
    rows, actions, units = len(inputs), signature.action_count, signature.memory_size
    shapes = tuple(array.shape for array in outputs)
    wanted = ((rows,), (rows, actions), (rows,), (rows, units))
    if sizes != (signature.observation_size, actions, units) or shapes != wanted or not rows:
        raise BundleError("reference rows do not fit the signature", file=path.name, remedy=_REMEDY)
    return inputs, outputs


def replay_reference(
    session: onnxruntime.InferenceSession, inputs: PolicyInputs, expected: Outputs
) -> tuple[CaseFigures, ...]:
    """Compares the graph with the reference at batch 1, 7 and 64; raises ParityError beyond the tolerances."""
    return tuple(
        compare("reference", batch, expected, run_session(session, inputs, batch), inputs) for batch in BATCHES
    )
