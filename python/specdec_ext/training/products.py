"""The products of the trainers, from options."""

from __future__ import annotations

import torch

from ..drafters.eagle3.shape import Eagle3Shape
from ..drafters.medusa.heads import MedusaHeads, MedusaHeadsConfig
from ..drafters.redrafter.model import Redrafter, RedrafterShape
from ..errors import ConfigError
from ..models.config_reader import ModelConfig
from ..models.drafter_files import DrafterShape
from .data import TrainingData
from .drafter import DrafterProduct, drafter_shape
from .eagle3 import Eagle3Product, eagle3_shape
from .loop import Product
from .loss import FrozenHead, Precision
from .medusa import MedusaProduct
from .options import TrainOptions
from .redrafter import RedrafterProduct
from .target import read_target

__all__ = ["check_product", "make_product", "trained_size"]


def check_product(options: TrainOptions, config: ModelConfig) -> None:
    """Raises ConfigError or ModelError for what cannot be trained for this target."""
    assert options.draft_vocab_size is not None  # TrainOptions.for_target()
    if options.draft_vocab_size > config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size = {options.draft_vocab_size}: the target has {config.vocab_size} "
            "tokens; choose at most as many"
        )
    if options.product == "drafter":
        _drafter_shape(options, config)
    if options.product == "eagle3":
        _eagle3_shape(options, config)


def _drafter_shape(options: TrainOptions, config: ModelConfig) -> DrafterShape:
    assert options.draft_vocab_size is not None and options.intermediate_size is not None
    return drafter_shape(
        config, num_layers=options.num_layers, intermediate_size=options.intermediate_size,
        draft_vocab_size=options.draft_vocab_size,
    )  # fmt: skip


def _eagle3_shape(options: TrainOptions, config: ModelConfig) -> Eagle3Shape:
    assert options.draft_vocab_size is not None and options.intermediate_size is not None
    return eagle3_shape(
        config, intermediate_size=options.intermediate_size,
        draft_vocab_size=options.draft_vocab_size,
    )  # fmt: skip


def trained_size(options: TrainOptions, config: ModelConfig) -> tuple[int, int]:
    """(parameters, outputs of all layers for one row) of what the options train."""
    module: torch.nn.Module
    if options.product in ("drafter", "eagle3"):
        expected = (
            _drafter_shape(options, config).expected_weights()
            if options.product == "drafter"
            else _eagle3_shape(options, config).expected_weights()
        )
        shapes = [shape for name, shape in expected.items() if name != "lm_head.weight"]
        matrices = [s for s in shapes if len(s) == 2]
        return sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes), sum(m[0] for m in matrices)
    with torch.device("meta"):
        if options.product == "medusa":
            module = MedusaHeads(
                MedusaHeadsConfig(
                    hidden_size=config.hidden_size,
                    vocab_size=config.vocab_size,
                    num_medusa_heads=options.num_heads,
                    num_medusa_layers=options.num_layers,
                    lm_head="target",
                )
            )
        else:
            module = Redrafter(
                RedrafterShape(
                    vocab_size=config.vocab_size,
                    hidden_size=config.hidden_size,
                    exit_dim=config.hidden_size,
                    num_draft_layers=options.num_layers,
                    rnn=True,
                    tie_lm_head=True,
                )
            )
    parameters = list(module.parameters())
    widths = sum(p.shape[0] for p in parameters if p.dim() == 2)
    return sum(p.numel() for p in parameters), widths


def make_product(
    options: TrainOptions,
    data: TrainingData,
    config: ModelConfig,
    sha: str,
    name: str,
    device: torch.device,
) -> Product:
    """The product of the options, its head and embeddings taken from the target."""
    rows = read_target(config, data.token_ids, embeds=options.product != "medusa")
    precision = Precision(options.settings.precision)
    head = FrozenHead(rows.head, data.ranked, device, dtype=precision.dtype, softcap=rows.softcap)
    share = options.settings.soft_share
    if options.product == "medusa":
        return MedusaProduct(
            data, head, num_heads=options.num_heads, num_layers=options.num_layers,
            soft_share=share, model_name=name, model_sha256=sha, dtype=options.dtype,
            device=device, precision=precision,
        )  # fmt: skip
    assert rows.embedding is not None
    if options.product == "redrafter":
        return RedrafterProduct(
            data, head, rows.embedding, num_layers=options.num_layers, draft_len=options.draft_len,
            soft_share=share, model_sha256=sha, dtype=options.dtype,
            seed=options.settings.seed, device=device, precision=precision,
        )  # fmt: skip
    if options.product == "eagle3":
        return Eagle3Product(
            data, head, rows.embedding, config, _eagle3_shape(options, config),
            steps=options.draft_len, soft_share=share, model_sha256=sha, dtype=options.dtype,
            seed=options.settings.seed, device=device, precision=precision,
        )  # fmt: skip
    return DrafterProduct(
        data, head, rows.embedding, config, _drafter_shape(options, config), soft_share=share,
        model_sha256=sha, dtype=options.dtype, device=device, precision=precision,
    )  # fmt: skip
