"""Any decoder-only causal model of transformers, on paged K/V with speculative attention.

The model's own classes run; three things are replaced: the attention function (attention_hook.py),
every nn.Linear (packed_modules.py), and the loading. Rows of all requests are packed into one
sequence [1, R] with explicit positions. A canary at load (canary.py) decides whether that is
faithful; a model for which it is not is refused with the reason.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ..errors import ModelError, UnsupportedModelError
from .adapter_taps import AdapterTaps
from .attention_hook import ATTENTION_NAME, StepContext, register, running
from .base import ModelInfo
from .cache_check import check_cache, greedy_ids
from .canary import canary_tokens, eager_scores, run_canary
from .config_reader import ModelConfig, transformers_config
from .device_step import PlanStaging
from .host_arrays import as_torch
from .kv_storage import KV_SCALE_SUFFIXES, KvStorage
from .output_head import OutputHead
from .packed_modules import swap_linears
from .place import CPU, Place
from .quiet import quiet_transformers
from .rope import max_position, rope_parameters
from .weights import Checkpoint
from .windows import asked_windows, limited_windows

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TransformersModel"]

# Rotary types whose frequencies transformers takes from the longest sequence of a step: a row would
# depend on its neighbours. Up to the original length they are constant.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class TransformersModel:
    """A StepModel on transformers' own classes (`impl` "transformers").

    Raises UnsupportedModelError when the model cannot be run faithfully, ModelError when its
    checkpoint is damaged.
    """

    impl = "transformers"

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        *,
        impl_reason: str,
        max_seq_len: int | None = None,
        allow_pickle: bool = False,
        place: Place | None = None,
        kv_storage: KvStorage | None = None,
        head_ids: np.ndarray | None = None,
        max_attention_window: Sequence[int] = (),
        sink_token_length: int = 0,
    ) -> None:
        """head_ids  int64 of the tokens that forward() scores, in this order; None: all"""
        register()
        config = dataclasses.replace(config, hf=transformers_config(config))
        self.place = place = place or CPU
        self._staging = PlanStaging(place.device)
        self._model, notes = _load(config, dtype, allow_pickle)
        self._model.to(place.device)
        forward_signature = inspect.signature(self._model.forward).parameters
        self._keeps_rows = "logits_to_keep" in forward_signature
        if "position_ids" not in forward_signature:
            raise _refused(config, "its forward takes no position_ids, so rows cannot be packed")
        torch_dtype = getattr(torch, dtype)
        head_rows: list[tuple[torch.Tensor, torch.Tensor]] = []

        def probe(plan: Any, context: StepContext) -> torch.Tensor:
            """_scores, keeping the head's input and output of the last step."""
            embedding = self._model.get_output_embeddings()
            if getattr(embedding, "in_features", None) != config.hidden_size:
                return self._scores(plan)
            hidden = torch.empty(plan.num_logit_rows, config.hidden_size)
            with self._head_input(plan, hidden):
                scores = self._scores(plan)
            head_rows[:] = [(hidden, scores.to("cpu", copy=True))]
            return scores

        tokens = canary_tokens(config.vocab_size)
        windows = asked_windows(config)
        self.layer_windows = limited_windows(
            windows, max_attention_window, sink_token_length, str(config.path)
        )
        self.sink_tokens = sink_token_length
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                reference = eager_scores(self._model, tokens)
                self._model.set_attn_implementation(ATTENTION_NAME)
                # Packed weights are the CPU's; on a device torch's own layers stay.
                num_linears, linear_bytes = swap_linears(self._model) if place.is_cpu else (0, 0)
                canary = run_canary(
                    probe,
                    num_layers=config.num_layers,
                    expected_windows=windows,
                    dtype=torch_dtype,
                    tokens=tokens,
                    reference=reference,
                    place=place,
                )
            except UnsupportedModelError as error:
                raise _refused(config, str(error)) from error
            except Exception as error:  # whatever a foreign class raises when it is not as assumed
                reason = " ".join(str(error).split())[:300]
                raise _refused(config, f"{type(error).__name__}: {reason}") from error
        self._head: OutputHead | str = "no linear layer turns its hidden states into scores"
        if head_rows:
            try:
                self._head = OutputHead(
                    self._model.get_output_embeddings(), config.hf, torch_dtype, *head_rows[0]
                )
            except UnsupportedModelError as error:
                self._head = str(error)
        self.max_position, rope_types, rope_note = _positions(config)
        if max_seq_len is not None:
            self.max_position = min(self.max_position, max_seq_len)
        notes += rope_note
        self.vocab_size = int(reference[0].shape[1])
        self.head_ids = None if head_ids is None else torch.from_numpy(head_ids).to(place.device)
        self.num_scores = self.vocab_size if head_ids is None else len(head_ids)
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.num_kv_heads, self.head_dim = canary.num_kv_heads, canary.head_dim
        self.kv_dtype = canary.kv_dtype
        self.kv_storage = kv_storage or KvStorage(dtype)
        self._kv_scales = tuple(
            torch.from_numpy(scales).to(place.device)
            for scales in (self.kv_storage.k_scale, self.kv_storage.v_scale)
            if scales is not None
        )
        # On a device a product's order of summing is not in our hands, whatever a few rows showed.
        is_exact = canary.is_exact and place.is_cpu
        self.numerics = "exact" if is_exact else "fast"
        self._taps: AdapterTaps | None = None
        self._k_pages: torch.Tensor | None = None
        self._v_pages: torch.Tensor | None = None
        # An embedding is looked up, not read through.
        tables = [m for m in self._model.modules() if isinstance(m, torch.nn.Embedding)]
        looked_up = {id(table.weight) for table in tables}
        read = [p for p in self._model.parameters() if id(p) not in looked_up]
        other_bytes = sum(p.numel() * p.element_size() for p in read)
        self.info = ModelInfo(
            path=config.path,
            architecture=type(self._model).__name__,
            model_type=config.model_type,
            impl=self.impl,
            impl_reason=impl_reason,
            numerics=self.numerics,
            numerics_reason=(
                "17 rows at once and in parts gave the same bits"
                if is_exact
                else "the model's own layers give other bits for other numbers of rows"
            ),
            dtype=dtype,
            num_layers=self.num_layers,
            hidden_size=config.hidden_size,
            num_heads=canary.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_position=self.max_position,
            eos_token_ids=config.eos_token_ids,
            bos_token_id=config.bos_token_id,
            pad_token_id=config.pad_token_id,
            tie_word_embeddings=config.tie_word_embeddings,
            sliding_window=max(self.layer_windows, default=0),
            rope_types=rope_types,
            num_parameters=notes.num_parameters,
            weight_bytes=linear_bytes + other_bytes,
            attention=(
                f"spec_attention through transformers ({config.num_layers} layers, {num_linears} "
                f"linear layers packed; canary error {canary.largest_error:.1e}; "
                f"{self.kv_storage.in_words})"
            ),
            warnings=tuple(notes.warnings),
            device=place.name,
        )

    def bind_cache(self, k_pages: Any, v_pages: Any) -> None:
        """See StepModel."""
        check_cache(self, k_pages, v_pages, self.place.device)
        self._k_pages, self._v_pages = as_torch(k_pages), as_torch(v_pages)

    @torch.inference_mode()
    def forward(self, plan: Any, hidden: Any = None) -> torch.Tensor:
        """See StepModel."""
        hidden = None if hidden is None else as_torch(hidden)
        if self._k_pages is None:
            raise ModelError("forward() before bind_cache(): the model has no K/V pages")
        context = StepContext(
            plan,
            self._k_pages,
            self._v_pages,
            place=self.place,
            staging=self._staging,
            kv_scales=self._kv_scales,
            layer_windows=self.layer_windows,
            sink_tokens=self.sink_tokens,
        )
        with running(context), self._head_input(plan, hidden):
            scores = self._scores(plan)
        if self.head_ids is not None:
            scores = scores.index_select(1, self.head_ids)
        return (scores if plan.needs_logits else greedy_ids(scores)).cpu()

    def set_taps(self, layers: Sequence[int], max_rows: int) -> np.ndarray:
        """See NativeModel.set_taps. Raises UnsupportedModelError where the decoder's layers are not
        found."""
        self._taps = AdapterTaps(self._model, layers, max_rows, self.hidden_size, self.num_layers)
        return self._taps.rows

    @torch.inference_mode()
    def embed_table(self) -> torch.Tensor:
        """[V, hidden_size] what embed() looks up."""
        table: torch.Tensor = self._model.get_input_embeddings().weight
        return table

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See StepModel."""
        table = self.embed_table()
        rows = functional.embedding(token_ids.to(table.device, torch.int64), table)
        return rows.float().to(token_ids.device)

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See StepModel."""
        return self._output_head().scores(hidden)

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See StepModel."""
        return self._output_head().rows(token_ids)

    def _output_head(self) -> OutputHead:
        if isinstance(self._head, str):
            raise UnsupportedModelError(
                f"{self.info.path}: the output head of {self.info.architecture} cannot be used on "
                f"its own: {self._head}; use a drafter with an output head of its own"
            )
        return self._head

    @contextmanager
    def _head_input(self, plan: Any, hidden: torch.Tensor | None) -> Iterator[None]:
        """Copies what the output head reads for the logit rows to `hidden`, if that is given."""
        if hidden is None:
            yield
            return
        rows = slice(None) if self._keeps_rows else self._ids(plan.logit_rows)

        def keep(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            hidden.copy_(args[0].reshape(-1, hidden.shape[1])[rows])

        handle = self._model.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @torch.inference_mode()
    def _scores(self, plan: Any) -> torch.Tensor:
        """float32 scores [L, V]; attention calls go to the running StepContext."""
        rows = self._ids(plan.logit_rows)
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self._model(
            input_ids=self._ids(plan.tokens)[None],
            position_ids=self._ids(plan.positions)[None],
            attention_mask=None,
            use_cache=False,
            **keep,
        )
        scores: torch.Tensor = output.logits[0] if self._keeps_rows else output.logits[0, rows]
        return scores.float().contiguous()

    def _ids(self, values: Any) -> torch.Tensor:
        """An array of a plan as int64 on the device."""
        return torch.from_numpy(values.astype("int64")).to(self.place.device)


class _Notes:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.num_parameters = 0

    def __iadd__(self, other: list[str]) -> _Notes:
        self.warnings += other
        return self


def _refused(config: ModelConfig, reason: str) -> UnsupportedModelError:
    name = config.architecture or config.model_type
    return UnsupportedModelError(
        f"{config.path}: {name} (model_type {config.model_type!r}) cannot be run faithfully: "
        f"{reason}; see docs/models.md for the families that are supported"
    )


def _load(config: ModelConfig, dtype: str, allow_pickle: bool) -> tuple[Any, _Notes]:
    import transformers

    causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = transformers.AutoModelForCausalLM

    if getattr(config.hf, "is_encoder_decoder", False):
        raise _refused(config, "it is an encoder-decoder")
    if type(config.hf) not in causal:
        raise _refused(config, "transformers has no causal language model for it")
    expected = causal[type(config.hf)].__name__
    if config.architecture and config.architecture != expected:
        raise _refused(config, f"architectures[0] is not the causal decoder {expected}")
    notes = _Notes()
    # Opens and checks every file first: what follows reports damage less precisely.
    with Checkpoint(config.path, allow_pickle=allow_pickle) as checkpoint:
        is_pickle = checkpoint.is_pickle
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, report = auto.from_pretrained(
                config.path,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=not is_pickle,
                weights_only=True,
                ignore_mismatched_sizes=True,  # reported, and refused below with both shapes
                output_loading_info=True,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(
                f"{config.path}: transformers cannot load this checkpoint: "
                f"{type(error).__name__}: {reason}"
            ) from error
    _check_report(config, report)
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        notes.num_parameters += parameter.numel()
        if not torch.isfinite(parameter.sum(dtype=torch.float32)):
            bad = int((~torch.isfinite(parameter)).sum())
            if bad:
                notes += [f"tensor {name!r} holds {bad} NaN or infinite values"]
    return model, notes


def _check_report(config: ModelConfig, report: Any) -> None:
    """transformers fills missing tensors with random numbers; here that is an error."""

    def get(key: str) -> Any:
        return report.get(key) if isinstance(report, dict) else getattr(report, key, None)

    for key, what in (
        ("missing_keys", "is missing from the checkpoint"),
        ("unexpected_keys", "has no place in the model that config.json describes"),
    ):
        names = sorted(n for n in get(key) or () if not n.endswith(KV_SCALE_SUFFIXES))
        if names:
            raise ModelError(
                f"{config.path}: tensor {names[0]!r} (and {len(names) - 1} more) {what}; the files "
                "are incomplete or of another architecture"
            )
    mismatched = sorted(get("mismatched_keys") or ())
    if mismatched:
        name, found, expected = (*mismatched[0], None, None)[:3]
        raise ModelError(
            f"{config.path}: tensor {name!r} has shape {list(found or ())}, config.json asks for "
            f"{list(expected or ())}; the files do not belong together"
        )


def _positions(config: ModelConfig) -> tuple[int, tuple[str, ...], list[str]]:
    """(positions served, rotary types, notes)."""
    hf = config.hf
    parameters = getattr(hf, "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, dict)]
    all_types = nested or ([rope_parameters(hf)] if parameters else [])
    kinds = tuple(dict.fromkeys(str(p.get("rope_type", "default")) for p in all_types))
    limit, notes = max_position(hf), []
    for entry in all_types:
        if entry.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = entry.get("original_max_position_embeddings") or hf.max_position_embeddings
            limit = min(limit, int(original))
            notes.append(
                f"rope_type {entry['rope_type']!r}: transformers takes the frequencies from the "
                f"longest sequence of a step, so the adapter serves {limit} positions, where they "
                "are constant"
            )
    return limit, kinds, notes
