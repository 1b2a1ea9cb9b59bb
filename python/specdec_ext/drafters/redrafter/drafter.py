"""ReDrafter at run time: the network on few-row linear layers, beam search, draft trees.

The state of a request is nothing but its last hidden state and token: a step starts the recurrence
afresh, so a request that ends leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ... import _core
from ...config.methods import ReDrafterDecodingConfig
from ...errors import ModelError
from ...models.native import NativeModel
from ...models.place import CPU
from ..base import DraftRequest, Proposal
from ..shipped import shipped_folder
from ..step_cost import StepCost, mean_context
from .beam_budget import BeamBudget
from .device_model import DeviceRedrafter
from .model import Redrafter, RedrafterShape, load_redrafter

__all__ = ["PackedRedrafter", "RedrafterDrafter", "check_target"]


class PackedRedrafter:
    """The network beside a native target, packed for few rows in the target's dtype.

    H hidden_size, V' scored tokens, R rows; tensors are float32.
    """

    def __init__(self, network: Redrafter, target: NativeModel) -> None:
        shape = network.shape
        self.shape = shape
        self.num_scores = shape.draft_vocab_size or shape.vocab_size
        self.token_ids = network.token_ids
        dtype = target.kv_dtype

        def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return _core.PackedLinear(
                weight.to(dtype).contiguous(), None if bias is None else bias.contiguous()
            )

        self._recurrence = self._input_proj = None
        if shape.rnn:
            # One product for both: [e, s] (W_w | W_u)^T + b.
            both = torch.cat((network.rnn_w.weight, network.rnn_u.weight), dim=1)
            self._recurrence = pack(both, network.rnn_u.bias)
        if shape.has_input_proj:
            self._input_proj = pack(network.input_proj.weight, network.input_proj.bias)
        blocks = network.blocks()
        self._blocks = [pack(block.linear.weight, block.linear.bias) for block in blocks]
        if not shape.tie_lm_head:
            self._head = pack(network.own_head().weight, None)
        elif self.token_ids is not None:
            self._head = pack(target.head_rows(self.token_ids), None)
        else:
            self._head = None
            target.head(torch.zeros(1, shape.hidden_size))  # refused here, not in a step

        self._network = _core.RecurrentDrafter(
            hidden_size=shape.hidden_size,
            num_scores=self.num_scores,
            recurrence=self._recurrence,
            projection=self._input_proj,
            blocks=self._blocks,
            target=target.core,
            head=self._head,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights of its own; a head that is the target's is not counted."""
        layers = [self._recurrence, self._input_proj, *self._blocks, self._head]
        return sum(int(layer.weight_bytes) for layer in layers if layer is not None)

    def start(self, hidden: Sequence[torch.Tensor], tokens: Sequence[int]) -> None:
        """One request a row: its hidden state [H] and last token."""
        self._network.start(hidden, tokens)

    def run(self, search: Any, gains: Sequence[float], pass_seconds: float) -> Any:
        """After start(): the search, to its end or until going on does not pay.

        gains, pass_seconds  see BeamBudget.depth_gains; returns a _core.SearchCost
        """
        return self._network.run(search, self.token_ids, gains, pass_seconds)

    def score(self, search: Any) -> None:
        """Run the layers for the rows of a _core.BeamSearch: one depth of what run() does."""
        self._network.score(search)

    def advance(self, search: Any) -> None:
        """The next depth of the search, from these scores."""
        self._network.advance(search, self.token_ids)

    @property
    def scores(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A copy of the last scores, [R, V']."""
        return self._network.scores


def check_target(shape: RedrafterShape, target: Any) -> None:
    """Raise ModelError when the drafter was made for a target of other sizes."""
    for name, ours, theirs in (
        ("hidden_size", shape.hidden_size, target.hidden_size),
        ("vocab_size", shape.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise ModelError(
                f"redrafter: the drafter was trained for {name} = {ours}, the target has "
                f"{theirs}; give the drafter of this target"
            )
    if target.embed(torch.zeros(1, dtype=torch.int32)).shape[1] != shape.hidden_size:
        raise ModelError(
            "redrafter: the target's input embeddings are not of its hidden_size = "
            f"{shape.hidden_size}; this drafter adds the two"
        )


class RedrafterDrafter:
    """Beams for all requests of a step at once; see Drafter."""

    name = "redrafter"
    needs_hidden = True
    hidden_device: torch.device | None = None

    def __init__(
        self, config: ReDrafterDecodingConfig, model: Any, *, allow_pickle: bool = False
    ) -> None:
        folder = shipped_folder("redrafter") if config.model is None else config.model
        network = load_redrafter(folder, allow_pickle=allow_pickle)
        place = getattr(model, "place", CPU)
        self._network: PackedRedrafter | DeviceRedrafter
        try:
            check_target(network.shape, model)
            if isinstance(model, NativeModel):
                self._network = PackedRedrafter(network, model)
            else:
                self._network = DeviceRedrafter(network, model)
                self.hidden_device = None if place.is_cpu else self._network.device
        except ModelError as error:
            raise type(error)(f"{folder}: {error}") from None
        self.device: str = place.name
        self._num_beams = config.num_beams
        self._search = _core.BeamSearch()
        self._budget = BeamBudget(config.draft_len_per_beam)
        self._steps = 0
        self._passes = 0
        self._rows = 0
        self._network_seconds = self._network_thread_seconds = 0.0

    @property
    def network_thread_seconds(self) -> float:
        """Processor time of the stepping thread inside the drafter's layers."""
        return self._network_thread_seconds

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step of `max_requests` requests may take besides the weights."""
        if isinstance(self._network, PackedRedrafter):
            return 0
        return self._network.scratch_bytes(max_requests * self._num_beams)

    def set_step_cost(self, cost: StepCost) -> None:
        """Take the cost table of the target's forward pass; adaptive requests are weighed by it."""
        self._budget.set_step_cost(cost)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal | None]:
        """See Drafter."""
        for request in requests:
            if request.num_drafted and request.state is not None:
                self._budget.observe(request.state, request.num_accepted)
            request.state = None
        self._budget.begin(len(requests), mean_context(requests))
        drafted = list(requests)
        if not self._budget.wants_drafts(len(requests)):
            drafted = [r for r in requests if not r.options["adaptive"]]
        proposals: dict[int, Proposal | None] = {}
        if drafted:
            passes = self._run_search(drafted)
            for request, proposal in zip(drafted, self._trees(drafted, passes), strict=True):
                proposals[request.request_id] = proposal
        return [proposals.get(request.request_id) for request in requests]

    def end(self, request: DraftRequest) -> None:
        """See Drafter; there is nothing to free."""

    def stats(self) -> Mapping[str, Any]:
        """See Drafter; network_seconds is the time inside the drafter's layers."""
        return {
            "memory_bytes": self._network.weight_bytes,
            "device": self.device,
            "draft_steps": self._steps,
            "draft_steps_skipped": self._budget.skipped,
            "network_passes": self._passes,
            "network_rows": self._rows,
            "network_seconds": self._network_seconds,
        }

    def _run_search(self, requests: Sequence[DraftRequest]) -> int:
        """Beams of every request; returns the passes of the network that it took."""
        search, network, budget = self._search, self._network, self._budget
        lengths = [min(r.options["length"], r.max_depth) for r in requests]
        widest = budget.num_beams(len(requests))
        search.start(
            [
                r.options["num_beams"]
                if widest is None or not r.options["adaptive"]
                else min(widest, r.options["num_beams"])
                for r in requests
            ],
            lengths,
            [r.options["temperature"] for r in requests],
            [r.options["keeps_laws"] for r in requests],
        )
        network.start([_hidden(r) for r in requests], [r.tokens[-1] for r in requests])
        gains = []
        if all(r.options["adaptive"] for r in requests):
            gains = budget.depth_gains(len(requests), max(lengths))
        cost = network.run(search, gains, budget.pass_seconds)
        budget.note_pass(cost.seconds / cost.passes)
        self._steps += 1
        self._passes += cost.passes
        self._rows += cost.rows
        self._network_seconds += cost.network_seconds
        self._network_thread_seconds += cost.network_thread_seconds
        return int(cost.passes)

    def _trees(self, requests: Sequence[DraftRequest], passes: int) -> Sequence[Proposal | None]:
        """Each request's beams as a tree, cut to its limit and to what is expected to pay."""
        search = self._search
        limits = [request.max_drafts for request in requests]
        adaptive = [i for i, request in enumerate(requests) if request.options["adaptive"]]
        if self._budget.known and adaptive:
            offered = {i: search.tree(i, limits[i]) for i in adaptive}
            others = sum(limits) - sum(limits[i] for i in adaptive)
            chosen = self._budget.choose(
                [(offered[i][2], offered[i][3]) for i in adaptive],
                passes=passes,
                other_rows=others,
            )
            for i, count in zip(adaptive, chosen, strict=True):
                limits[i] = count
        proposals = [self._proposal(i, request, limits[i]) for i, request in enumerate(requests)]
        if self._budget.known and adaptive:
            verified = max(_num_paths(proposals[i]) for i in adaptive)
            self._budget.note_beams(len(requests), verified)
        return proposals

    def _proposal(self, index: int, request: DraftRequest, limit: int) -> Proposal | None:
        tokens, parents, expected = self._search.proposal(index, limit)
        if not tokens:
            return None
        request.state = expected
        if not request.options["keeps_laws"]:
            # Beams are chosen, not drawn: to a lossless rule they have no law.
            return Proposal(tokens, parents)
        laws = self._search.tree_laws(index, limit, self._network.num_scores)
        return Proposal(
            tokens,
            parents,
            torch.from_numpy(laws),
            self._network.token_ids,
            replacement=True,  # the rule holds every draft against its whole law
        )


def _num_paths(proposal: Proposal | None) -> int:
    """Paths of a tree: nodes that are nobody's parent."""
    if proposal is None:
        return 0
    parents = set(proposal.parents or ())
    return len(proposal.tokens) + (-1 in parents) - len(parents)


def _hidden(request: DraftRequest) -> torch.Tensor:
    if request.hidden is None:
        raise RuntimeError(f"request {request.request_id} came without its hidden state")
    return request.hidden
