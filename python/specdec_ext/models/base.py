"""The StepModel protocol, which the engine needs of a model, and a loaded model's description.

A model owns its weights and its forward pass; the executor owns the K/V pages, the plan and every
decision about tokens. One step: `plan = ex.plan()`, `result = model.forward(plan)`,
`ex.commit(plan, result)`.

Axis letters (cpp/base/types.h): L rows whose scores are needed, V vocabulary, G KV heads,
K head dim, P pages, S tokens per page.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["ModelInfo", "StepModel"]


@dataclass(frozen=True)
class ModelInfo:
    """A description of a loaded model, for `specdec inspect`, reports and the memory plan.

    weight_bytes     bytes that one step reads: packed weights without the embedding rows it skips
    rope_types       one entry per distinct rotary table, e.g. ("default",) or ("linear", "default")
    sliding_window   tokens; 0: no layer has a window
    attention        the attention kernel that runs, in words
    impl_reason      why this implementation was chosen
    numerics_reason  why `numerics` has its value
    device           where it runs, as LLM(device=...) takes it
    warnings         findings that did not stop the loader (NaN weights, ignored tensors)
    """

    path: Path
    architecture: str
    model_type: str
    impl: str
    impl_reason: str
    numerics: str
    numerics_reason: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    tie_word_embeddings: bool
    sliding_window: int
    rope_types: tuple[str, ...]
    num_parameters: int
    weight_bytes: int
    attention: str
    warnings: tuple[str, ...] = ()
    device: str = "cpu"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        values = asdict(self)
        values["path"] = str(self.path)
        return values


@runtime_checkable
class StepModel(Protocol):
    """A decoder that runs one StepPlan at a time over paged K/V.

    numerics  "exact": the bits of a row depend on its position and its path alone, so speculative
              output equals plain output by construction. "fast": they may depend on the number of
              rows of a step; near-ties can then differ.
    impl      "native" (this package's fused decoder) or "transformers" (the adapter).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    numerics: str
    impl: str
    info: ModelInfo

    @property
    def kv_dtype(self) -> torch.dtype:
        """The data type in which K and V are computed.

        Pages hold this type, unless the model has an attribute `kv_storage` that names another
        (kv_storage.py).
        """
        ...

    def bind_cache(self, k_pages: Any, v_pages: Any) -> None:
        """Use these pages from now on.

        k_pages, v_pages  of kv_storage.page_shape(), which is [num_layers, P, G, S, K] of kv_dtype
                          unless they are stored in fewer bits; contiguous, on the device. Tensors,
                          or on the CPU the core's LazyZeros

        The model keeps references. A step uses the pages that its plan's page table names. Raises
        ModelError if a shape or dtype does not fit the model.
        """
        ...

    def forward(self, plan: Any, hidden: Any = None) -> Any:
        """Run the rows of `plan` (a _core.StepPlan) and append their K/V to the pages.

        Returns float32 scores [L, V] if plan.needs_logits, else int32 greedy ids [L]: the first
        largest score of each row, -1 for a row that holds a NaN. The result is valid until the next
        call. The native decoder on the CPU returns NumPy arrays, all other models torch tensors.
        A model that finds the ids beside the scores at little cost has them in an attribute,
        `best_ids`, until the next call; whoever changes the scores sets it to None.

        hidden  float32 [L, hidden_size], contiguous, on the host or on the model's device. It
                receives the head's input for each of these rows: the output of the final norm
        """
        ...

    def embed(self, token_ids: Any) -> Any:
        """Rows of the input embedding table as stored, without the model's scale.

        Returns float32 [n, hidden_size] for int32 ids [n], each within the vocabulary. The result
        is where the ids are, on the host or on the model's device; the same holds for head() and
        head_rows(). The native decoder on the CPU also takes NumPy arrays, and then returns them.
        """
        ...

    def head(self, hidden: Any) -> Any:
        """float32 scores [n, V] of the output head for float32 rows [n, hidden_size].

        For rows that forward() has written to `hidden` they are the scores that the step computed
        (native: bit for bit). Raises UnsupportedModelError if the head cannot be used on its own.
        """
        ...

    def head_rows(self, token_ids: Any) -> Any:
        """float32 [n, hidden_size]: rows of the output head's weight for int32 ids [n].

        They do not include the head's bias or soft cap. Raises as head() does.
        """
        ...
