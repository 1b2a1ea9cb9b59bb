"""Medusa's heads where a device's model runs, against those of the host.

The device is torch's CPU: what is tested is what is computed, not a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_redrafter_model import EmbeddingTarget

from host_weights import head_weights
from specdec_ext.drafters.medusa.device_heads import DeviceHeads
from specdec_ext.drafters.medusa.heads import MedusaHeads, MedusaHeadsConfig
from specdec_ext.drafters.medusa.packed_heads import PackedHeads
from specdec_ext.errors import UnsupportedModelError
from specdec_ext.models.place import Place

HIDDEN, VOCAB = 12, 90
PLACE = Place("stub", "cpu", "stub")


class Target(EmbeddingTarget):
    """On a device; its head's and embedding's rows are asked for where the ids lie."""

    place = PLACE


def make_heads(lm_head: str, ids: list[int] | None, layers: int, bias: bool) -> MedusaHeads:
    config = MedusaHeadsConfig(
        HIDDEN, VOCAB, 4, num_medusa_layers=layers, lm_head=lm_head, has_bias=bias,
        draft_vocab_size=None if ids is None else len(ids),
    )  # fmt: skip
    heads = MedusaHeads(config, None if ids is None else torch.tensor(ids))
    generator = torch.Generator().manual_seed(layers)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return heads.requires_grad_(False)


def target_of(hidden: int, vocab: int, dtype: torch.dtype) -> Target:
    torch.manual_seed(hidden)
    shape = type("Shape", (), {"hidden_size": hidden, "vocab_size": vocab})()
    return Target(shape, dtype)


@pytest.mark.parametrize("ids", [None, list(range(80, 10, -3))], ids=["all", "reduced"])
@pytest.mark.parametrize("lm_head", ["own", "shared", "target"])
@pytest.mark.parametrize(("layers", "bias"), [(0, True), (1, True), (2, True), (2, False)])
def test_heads_guess_what_they_guess_on_the_host(
    lm_head: str, ids: Any, layers: int, bias: bool
) -> None:
    heads, target = make_heads(lm_head, ids, layers, bias), target_of(HIDDEN, VOCAB, torch.float32)
    kept = 3  # of four
    host = PackedHeads(head_weights(heads), target, num_heads=kept, dtype="float32")
    device = DeviceHeads(heads, target, num_heads=kept, dtype=torch.float32)
    own_bytes = sum(p.numel() for n, p in heads.named_parameters()) * 4 * kept // 4
    if lm_head == "own":
        assert device.weight_bytes == own_bytes
    assert device.scratch_bytes(5) == 2 * kept * 5 * device.num_scores * 4
    for batch, asked in ((1, 3), (5, 2), (5, 1)):
        hidden = torch.randn(batch, HIDDEN)
        expected = torch.from_numpy(host.core.scores(hidden.numpy(), asked))
        scores = device.scores(hidden, asked)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)
        found = device.best(hidden, asked, 7)
        assert found.transpose(0, 1).tolist() == host.core.best(hidden, asked, 7).tolist()


def test_heads_in_the_targets_dtype() -> None:
    """Activations are rounded to bfloat16 there: close to the host's, and no more."""
    heads, target = make_heads("own", None, 1, True), target_of(HIDDEN, VOCAB, torch.bfloat16)
    host = PackedHeads(head_weights(heads), target, num_heads=4, dtype="bfloat16")
    device = DeviceHeads(heads, target, num_heads=4, dtype=torch.bfloat16)
    hidden = torch.randn(3, HIDDEN)
    expected = torch.from_numpy(host.core.scores(hidden.numpy(), 4))
    error = (device.scores(hidden, 4).float() - expected).abs().max() / expected.abs().max()
    assert 0 < float(error) < 3e-2


class Elsewhere(Target):
    """On torch's "meta" device, which computes nothing and mixes with no other."""

    place = Place("elsewhere", "meta", "stub")

    def __init__(self, shape: Any, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.table, self.rows = self.table.to("meta"), self.rows.to("meta")


@pytest.mark.parametrize("ids", [None, list(range(5))], ids=["all", "reduced"])
@pytest.mark.parametrize("lm_head", ["own", "shared", "target"])
def test_every_tensor_of_the_heads_is_on_the_device(lm_head: str, ids: Any) -> None:
    shape = type("Shape", (), {"hidden_size": HIDDEN, "vocab_size": VOCAB})()
    target = Elsewhere(shape, torch.bfloat16)
    heads = make_heads(lm_head, ids, 2, True)
    device = DeviceHeads(heads, target, num_heads=3, dtype=torch.bfloat16)
    assert device.best(torch.zeros(2, HIDDEN, device="meta"), 2, 4).device.type == "meta"


def test_a_target_without_a_head_of_its_own_is_refused_at_once() -> None:
    class Headless(Target):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            raise UnsupportedModelError("no head")

    target = target_of(HIDDEN, VOCAB, torch.float32)
    heads = make_heads("target", None, 1, True)
    headless = Headless(
        type("S", (), {"hidden_size": HIDDEN, "vocab_size": VOCAB})(), target.kv_dtype
    )
    with pytest.raises(UnsupportedModelError, match="no head"):
        DeviceHeads(heads, headless, num_heads=4, dtype=torch.float32)
