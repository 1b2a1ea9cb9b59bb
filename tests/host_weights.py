"""The parameters of drafters' modules as the host's drafters take them, in the same memory."""

from __future__ import annotations

from typing import Any

from specdec_ext.drafters.medusa.heads import MedusaHeads
from specdec_ext.drafters.medusa.weights import HeadWeights, check_weights
from specdec_ext.drafters.redrafter.checkpoint import TOKEN_IDS, RedrafterWeights
from specdec_ext.drafters.redrafter.model import Redrafter
from specdec_ext.models.host_arrays import from_torch

__all__ = ["head_weights", "redrafter_weights"]


def head_weights(heads: MedusaHeads) -> HeadWeights:
    tensors = {name: from_torch(tensor) for name, tensor in heads.weights()}
    return check_weights(heads.config, tensors, source="these heads")


def redrafter_weights(model: Redrafter) -> RedrafterWeights:
    tensors: dict[str, Any] = {
        name: from_torch(value) for name, value in model.state_dict().items()
    }
    ids = tensors.pop(TOKEN_IDS, None)
    return RedrafterWeights(model.shape, tensors, ids)
