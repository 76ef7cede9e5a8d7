"""Perception of the built-in line: one small network for every machine, which also sees the machines beside it.

A fault shows on the machines that the faulty one feeds and on those that feed it, in a line of any topology. What tells
a bearing from a belt is the same for machine 2 as for machine 5, so the weights are shared over the machines (as in
Deep Sets, Zaheer et al., 2017) and the neighbours come in through the couplings of the line's topology (as in the
message passing of Gilmer et al., 2017). With x_m what is known of machine m, C the coupling matrix of the topology
(C_mn: how far a fault of m reaches n), and P the machines that are there:

    z_m = f(A [x_m | sum_n C_mn r_n | sum_n C_nm r_n | mean r | max |r| | line | m] + a)     r_m: historian's means of m
    y_m = f(B [z_m | sum_n C_mn z_n | sum_n C_nm z_n] + b)
    o_m = O y_m + o     one logit for each mode,    s_m = S y_m + s     one for each severity

p(machine m, mode k) is the softmax of o over all machines that are there and all modes, where the false alarm, which
has no machine, counts once. The logits of the two questions are the logarithms of its marginals (up to what
all have in common), those of the severity the mean of s_m under p(machine).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from agentpipe.environments.geometry import downstream_matrices
from agentpipe.environments.layout import CHANNELS, FALSE_ALARM, MACHINES, MODES, SEVERITIES, TOPOLOGIES, block_start
from agentpipe.learning.joint.perception import Perception

if TYPE_CHECKING:
    from agentpipe.learning.options import Activation

_READING, _MEAN = block_start("reading"), block_start("mean")
_BY_MACHINE: Final = tuple(block_start(name) for name in ("age", "count", "present", "declared_machine", "tried"))
_PRESENT, _TOPOLOGY = block_start("present"), block_start("topology")
_PUBLIC: Final = slice(_PRESENT, _TOPOLOGY + len(TOPOLOGIES))
"""what is taken as it is, not normalised: which machines there are, and the topology"""
_LINE: Final = slice(block_start("link"), block_start("segment"))
_REFUTED: Final = slice(block_start("tried") + MACHINES, block_start("tried") + MACHINES + len(MODES))
OWN: Final = 2 * CHANNELS + len(_BY_MACHINE)
"""of one machine: reading and mean of each channel, age, packets, whether it is there, declared, refuted"""
INPUTS: Final = OWN + 4 * CHANNELS + (_LINE.stop - _LINE.start) + len(MODES) + MACHINES
"""and means of those it feeds and of those that feed it, mean and largest of the line; link and PLC, refuted modes; its
place in the line"""
_NEVER: Final = -30.0
"""logit of what cannot be"""


class LinePerception(Perception):
    """The network of the module's formula; what it takes and gives is as in :class:`Perception`.

    Parameters: (F + 1) w + (3 w + 1) w + (w + 1) (10 + 3) with F = :data:`INPUTS`.

    Args:
        width: w, of both layers.
        activation: f.
    """

    couplings: Tensor
    shift: Tensor
    unit: Tensor

    def __init__(self, width: int, activation: Activation) -> None:
        nn.Module.__init__(self)
        self.activation = activation
        self.register_buffer("couplings", torch.from_numpy(downstream_matrices()).flatten(1), persistent=False)
        public = _PUBLIC.stop - _PUBLIC.start
        self.register_buffer("shift", torch.zeros(public), persistent=False)
        self.register_buffer("unit", torch.ones(public), persistent=False)
        self.alone = nn.Linear(INPUTS, width)
        self.together = nn.Linear(3 * width, width)
        self.answers = nn.Linear(width, len(MODES) + len(SEVERITIES))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Orthogonal weights, of gain 0.01 at the end: the first beliefs are nearly uniform; zero biases."""
        gain = nn.init.calculate_gain(self.activation)
        for layer, size in ((self.alone, gain), (self.together, gain), (self.answers, 0.01)):
            nn.init.orthogonal_(layer.weight, size, generator=generator)
            nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, scale: Tensor) -> None:
        """Tells how observations are normalised, f32[D] each."""
        self.shift.copy_(mean[_PUBLIC])
        self.unit.copy_(1.0 / scale[_PUBLIC])

    def forward(self, base: Tensor) -> Tensor:
        """Logits f32[n, 21] of the base encoding f32[n, E]."""
        rows = base.shape[0]
        public = base[:, _PUBLIC] * self.unit + self.shift
        present, topology = public[:, :MACHINES, None], public[:, MACHINES:]
        feeds = (topology @ self.couplings).view(rows, MACHINES, MACHINES)
        fed = feeds.transpose(1, 2)
        hidden = self._activate(self.alone(self._about(base, present, feeds, fed))) * present
        around = torch.cat([hidden, torch.bmm(feeds, hidden), torch.bmm(fed, hidden)], dim=2)
        answers = self.answers(self._activate(self.together(around)))
        return _marginals(answers, present)

    @staticmethod
    def _about(base: Tensor, present: Tensor, feeds: Tensor, fed: Tensor) -> Tensor:
        """f32[n, MACHINES, INPUTS]: what is known of each machine."""
        rows = base.shape[0]
        reading = base[:, _READING : _READING + MACHINES * CHANNELS].view(rows, MACHINES, CHANNELS)
        mean = base[:, _MEAN : _MEAN + MACHINES * CHANNELS].view(rows, MACHINES, CHANNELS) * present
        single = torch.stack([base[:, start : start + MACHINES] for start in _BY_MACHINE], dim=2)
        middle = mean.sum(dim=1, keepdim=True) / present.sum(dim=1, keepdim=True).clamp_min(1.0)
        largest = mean.abs().amax(dim=1, keepdim=True)
        line = torch.cat([base[:, _LINE], base[:, _REFUTED]], dim=1).unsqueeze(1)
        common = torch.cat([middle, largest, line], dim=2).expand(rows, MACHINES, -1)
        place = torch.eye(MACHINES).expand(rows, MACHINES, MACHINES)
        return torch.cat([reading, mean, single, torch.bmm(feeds, mean), torch.bmm(fed, mean), common, place], dim=2)

    def _activate(self, values: Tensor) -> Tensor:
        return values.tanh() if self.activation == "tanh" else values.relu()


def _marginals(answers: Tensor, present: Tensor) -> Tensor:
    """Logits f32[n, 21] of machine, mode and severity from those f32[n, MACHINES, 13] of each machine."""
    there = answers + (1.0 - present) * _NEVER
    modes = there[..., : len(MODES)]
    faulty = modes[..., :FALSE_ALARM]
    machine = faulty.logsumexp(dim=2)
    alarm = modes[..., FALSE_ALARM].logsumexp(dim=1, keepdim=True)
    mode = torch.cat([faulty.logsumexp(dim=1), alarm], dim=1)
    severity = (machine.softmax(dim=1).unsqueeze(2) * answers[..., len(MODES) :]).sum(dim=1)
    return torch.cat([machine, mode, severity], dim=1)
